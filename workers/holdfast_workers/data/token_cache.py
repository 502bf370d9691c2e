"""The files of token sets in a node's cache, and what the fetching process reports beside them.

Manifests and shards have their digests in their names, and get these names only once their content
is verified and on disk. So the fetch takes a file of the right size for the right one; readers
verify it again (`token_corpus`), as disks may damage it. The report on a set gives the reason why
something of it is not there yet.
"""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path

from holdfast_workers.data.token_set import BadTokenSet, ShardFacts, TokenSet
from holdfast_workers.private_files import write_private
from holdfast_workers.spec import PreparedSpec

_NAME = re.compile(r"tokens-[0-9a-f]{32}\.json|shard-[0-9a-f]{32}\.bin")


def manifest_file(cache_dir: Path, prepared: PreparedSpec) -> Path:
    return cache_dir / f"tokens-{prepared.digest}.json"


def shard_file(cache_dir: Path, shard: ShardFacts) -> Path:
    return cache_dir / f"shard-{shard.digest}.bin"


def is_name(name: str) -> bool:
    """Whether a file of the cache with this name is a manifest or a shard."""
    return _NAME.fullmatch(name) is not None


def decoded(content: bytes, where: str, prepared: PreparedSpec) -> TokenSet:
    """The manifest of exactly this set. Raises BadTokenSet; `where`: its place, for the error."""
    token_set = TokenSet.decode(content, where)
    if token_set.digest != prepared.digest:
        raise BadTokenSet(
            f"{where} is of the tokens {token_set.digest}, and the job was prepared with "
            f"{prepared.digest}: the source was prepared again; start the job anew, or restore the "
            "former token set"
        )
    return token_set


def report_trouble(cache_dir: Path, prepared: PreparedSpec, reason: str) -> None:
    """Leave the reason why a file of the set is missing; "": none is, or not yet. Raises
    OSError."""
    report = _report_file(cache_dir, prepared)
    if reason:
        write_private(report, json.dumps({"reason": reason}))
    else:
        report.unlink(missing_ok=True)


def reported_trouble(cache_dir: Path, prepared: PreparedSpec) -> str:
    """The reason that the fetching process left; "" without one."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads(_report_file(cache_dir, prepared).read_bytes())["reason"])
    return ""


def _report_file(cache_dir: Path, prepared: PreparedSpec) -> Path:
    return cache_dir / f"fetch-{prepared.digest}.json"
