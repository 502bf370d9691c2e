"""Publishes a checkpoint by writing its manifest; a checkpoint without a manifest does not count.

The manifest is written last, in one piece, and never changes. It is written only if every rank's
file exists with the recorded size and the boxes of every tensor tile it. It is withdrawn if a
removal began meanwhile. Importing this module loads torch, which writes stock's `.metadata`.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from typing import Any

from holdfast_workers.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    REMOVING,
    VERSION,
    BadCheckpoint,
    CheckpointExists,
    IncompleteCheckpoint,
    Manifest,
    checkpoint_folder,
    content_digest,
    parse_manifest,
    read_manifest,
)
from holdfast_workers.checkpoint.manifest_checks import check_sizes, check_tiling
from holdfast_workers.checkpoint.stock import write_stock_metadata
from holdfast_workers.checkpoint.storage import ObjectExists, Storage, joined


def finalize(
    checkpoint: Storage, records: list[dict[str, Any]], mesh: dict[str, int], extra: dict[str, Any]
) -> Manifest:
    """Publish the records that `save_shard` made on every rank; durable on return.

    A repetition with the same records is harmless. Raises IncompleteCheckpoint if a rank is
    missing or the boxes of a tensor do not tile it, BadCheckpoint if a file is not as recorded or
    the folder is being removed, CheckpointExists if another manifest has been published here.
    """
    step, attempt = _common_step(checkpoint.uri, records, mesh)
    records = sorted(records, key=lambda record: int(record["rank"]))
    content = {
        "format": FORMAT,
        "version": VERSION,
        "step": step,
        "attempt": attempt,
        "mesh": mesh,
        "byteorder": sys.byteorder,
        "files": [
            {key: record[key] for key in ("name", "rank", "nbytes", "sha256")} for record in records
        ],
        "tensors": [tensor for record in records for tensor in record["tensors"]],
        "extra": extra,
    }
    manifest = parse_manifest(checkpoint.uri, {**content, "digest": content_digest(content)})
    check_tiling(manifest.uri, (each for each in manifest.tensors if not each.per_rank))
    sizes = checkpoint.objects()
    check_sizes(manifest, sizes)
    if MANIFEST in sizes:
        return _same_as_published(checkpoint, manifest)
    write_stock_metadata(checkpoint, manifest)
    with contextlib.suppress(ObjectExists):  # compared with ours below
        checkpoint.put_new(MANIFEST, json.dumps({**content, "digest": manifest.digest}).encode())
    _require_untouched(checkpoint, manifest)
    return _same_as_published(checkpoint, manifest)


def _common_step(uri: str, records: list[dict[str, Any]], mesh: dict[str, int]) -> tuple[int, int]:
    """Step and attempt of the records. Raises IncompleteCheckpoint unless they are of one whole
    world and belong into this folder."""
    ranks = sorted(record["rank"] for record in records)
    world_size = math.prod(mesh.values())
    if ranks != list(range(world_size)):
        raise IncompleteCheckpoint(
            f"{uri}: {world_size} ranks are needed, these are present: {ranks}"
        )
    states = {(record["step"], record["attempt"]) for record in records}
    if len(states) != 1:
        raise IncompleteCheckpoint(f"{uri}: the shards are of several states: {sorted(states)}")
    step, attempt = states.pop()
    if uri.rpartition("/")[2] != checkpoint_folder(step, attempt):
        raise IncompleteCheckpoint(f"{uri} cannot hold step {step} of attempt {attempt}")
    return step, attempt


def _require_untouched(checkpoint: Storage, manifest: Manifest) -> None:
    """Take the manifest back if a removal began before it was written and so did not see it. Each
    side writes its intent before it looks for the other side's."""
    sizes = checkpoint.objects()
    try:
        if REMOVING in sizes:
            raise BadCheckpoint(joined(checkpoint.uri, REMOVING), "it is being removed")
        check_sizes(manifest, sizes)
    except BadCheckpoint:
        checkpoint.delete(MANIFEST)
        raise


def _same_as_published(checkpoint: Storage, manifest: Manifest) -> Manifest:
    published = read_manifest(checkpoint)
    if published.digest != manifest.digest:
        raise CheckpointExists(f"{checkpoint.uri} holds another manifest: {published.digest}")
    return published
