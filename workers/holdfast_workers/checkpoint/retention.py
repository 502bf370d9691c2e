"""Carries out retention in the remote tier; `retention_rules` decides what is removed.

Also never removed: quarantined checkpoints, and checkpoints that were marked since the decision.
A removal begins with the manifest, so that an interrupted removal leaves nothing that looks
complete.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection

from holdfast_workers.checkpoint.manifest import (
    FOLDER_NAME,
    MANIFEST,
    QUARANTINED,
    BadCheckpoint,
    Manifest,
    checkpoint_folder,
    list_checkpoints,
    verify,
)
from holdfast_workers.checkpoint.marks import marks_among, remove_unmarked
from holdfast_workers.checkpoint.retention_rules import StoredCheckpoint, checkpoints_to_remove
from holdfast_workers.checkpoint.storage import ObjectExists, Storage
from holdfast_workers.spec import RemoteTierSpec


def quarantine(checkpoint: Storage, reason: str) -> None:
    """Exclude a checkpoint from listings and keep it as evidence. Does nothing if the checkpoint
    has been removed meanwhile."""
    if MANIFEST not in checkpoint.objects():
        return
    with contextlib.suppress(ObjectExists):  # the first reason stays
        checkpoint.put_new(QUARANTINED, f"{reason}\n".encode())


def retain(
    root: Storage,
    rules: RemoteTierSpec,
    *,
    current_attempt: int,
    unfinished: Collection[tuple[int, int]] = (),
    may_remove: Callable[[], bool] = lambda: True,
) -> dict[str, str]:
    """Remove the checkpoints that the rules do not keep; return the reason by folder name.

    The `unfinished` checkpoints, as (step, attempt), are still to be published and are kept. Reads
    the newest checkpoint in full, but only if a complete checkpoint is to be removed. `may_remove`
    is asked before each removal; the first no ends them.
    """

    def is_whole(stored: StoredCheckpoint) -> bool:
        try:
            verify(root.below(checkpoint_folder(stored.step, stored.attempt)))
        except BadCheckpoint:
            return False
        return True

    removed = {}
    present = [
        stored
        for stored in _stored_checkpoints(root)
        if stored.complete or stored.age not in unfinished
    ]
    for removal in checkpoints_to_remove(
        present, rules, current_attempt=current_attempt, is_whole=is_whole
    ):
        if not may_remove():
            break
        folder = checkpoint_folder(removal.checkpoint.step, removal.checkpoint.attempt)
        if remove_unmarked(root.below(folder)):
            removed[folder] = removal.reason
    return removed


def _stored_checkpoints(root: Storage) -> list[StoredCheckpoint]:
    """Complete checkpoints and incomplete folders; folders with a damaged manifest are left out."""
    complete = {manifest.folder: manifest for manifest in list_checkpoints(root)}
    names = root.objects()
    stored = []
    for folder in root.folders():
        name = FOLDER_NAME.fullmatch(folder)
        if folder in complete:
            stored.append(_complete_checkpoint(complete[folder], names))
        elif name and {f"{folder}/{MANIFEST}", f"{folder}/{QUARANTINED}"}.isdisjoint(names):
            stored.append(StoredCheckpoint(int(name[1]), int(name[2]), complete=False))
    return stored


def _complete_checkpoint(manifest: Manifest, names: dict[str, int]) -> StoredCheckpoint:
    marks = marks_among(names, manifest.folder)
    return StoredCheckpoint(
        step=manifest.step,
        attempt=manifest.attempt,
        metrics=manifest.metrics,
        pinned=marks.pinned,
        needed=bool(marks.needed_by),
    )
