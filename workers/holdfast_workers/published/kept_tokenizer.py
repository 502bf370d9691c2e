"""A tokenizer's files beside the token set that was made with it, so that an export has them.

They do not belong to the set's digest: jobs share a set whose tokenizers differ in the files beside
`tokenizer.json`. Each file is named by its digest, and so is the record of all files of a
preparation, which is written after them. A job's spec has the digest of its record.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping

from holdfast_workers.checkpoint.storage import (
    ObjectExists,
    ObjectMissing,
    Storage,
    joined,
    write_small,
)
from holdfast_workers.published.weight_set import BadWeightSet, digest_of
from holdfast_workers.spec import PreparedSpec

TOKENIZER = "tokenizer.json"
KEPT_BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
"""The files that are kept with it, if they are there."""
_FOLDER = "tokenizer"


def keep_tokenizer(set_storage: Storage, files: Mapping[str, bytes]) -> str | None:
    """Keep the files by name. Returns the digest of their record; None: there are no files. Raises
    StorageError."""
    if not files:
        return None
    storage = set_storage.below(_FOLDER)
    digests = {name: digest_of(content) for name, content in files.items()}
    record = json.dumps(digests, sort_keys=True).encode()
    digest = digest_of(record)
    if _record_name(digest) not in storage.objects():
        for name, content in files.items():
            write_small(storage, digests[name], content)
        with contextlib.suppress(ObjectExists):  # another preparation has kept the same files
            storage.put_new(_record_name(digest), record)
    return digest


def kept_tokenizer(prepared: PreparedSpec, set_storage: Storage) -> dict[str, bytes]:
    """The files by name, as they were when a job's source was prepared; {}: none are kept. Raises
    BadWeightSet if one is damaged, StorageError."""
    if prepared.tokenizer_files is None:
        return {}
    storage = set_storage.below(_FOLDER)
    name = _record_name(prepared.tokenizer_files)
    try:
        digests = json.loads(_read(storage, name, prepared.tokenizer_files))
    except ObjectMissing:
        return {}
    if digests.get(TOKENIZER) != prepared.tokenizer:
        raise BadWeightSet(f"{joined(storage.uri, name)} is not of the tokenizer of the token set")
    return {
        file: _read(storage, digests[file], digests[file])
        for file in (TOKENIZER, *KEPT_BESIDE)
        if file in digests
    }


def _record_name(digest: str) -> str:
    return f"{digest}.json"


def _read(storage: Storage, name: str, digest: str) -> bytes:
    content = storage.read(name)
    if digest_of(content) != digest:
        raise BadWeightSet(f"{joined(storage.uri, name)} is damaged")
    return content
