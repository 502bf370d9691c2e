"""The files of token sets in a node's cache, and what the fetching process reports beside them.

Manifests and shards have their digests in their names, and get these names only once their content
is verified and on disk. So the fetch takes a file of the right size for the right one; readers
verify it again (`token_corpus`), as disks may damage it. The report on a set gives the reason why
something of it is not there yet.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from holdfast_workers.data.corpus import CorpusError
from holdfast_workers.data.token_set import BadTokenSet, ShardFacts, TokenSet
from holdfast_workers.node_cache.cached_file import LIMIT_VARIABLE
from holdfast_workers.private_files import write_private
from holdfast_workers.spec import PreparedSpec


def manifest_file(cache_dir: Path, prepared: PreparedSpec) -> Path:
    return cache_dir / f"tokens-{prepared.digest}.json"


def shard_file(cache_dir: Path, shard: ShardFacts) -> Path:
    return cache_dir / f"shard-{shard.digest}.bin"


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


def distinct_shards(sets: Iterable[TokenSet]) -> list[ShardFacts]:
    """In their order; sources may have shards of the same content."""
    return list({shard.digest: shard for each in sets for shard in each.shards}.values())


def refuse_larger_than_cache(sets: Sequence[TokenSet], limit_bytes: int) -> None:
    """Raises CorpusError unless the cache of a node may keep all sets of a job."""
    manifests = {each.digest: len(each.encode()) for each in sets}
    needed = sum(shard.nbytes for shard in distinct_shards(sets)) + sum(manifests.values())
    if needed > limit_bytes:
        raise CorpusError(
            f"the token sets of this job have {needed / 1e9:.3g} GB, and the cache of a node keeps "
            f"at most {limit_bytes / 1e9:.3g} GB: set {LIMIT_VARIABLE} on the nodes to more than "
            "the former, or use less data"
        )


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
