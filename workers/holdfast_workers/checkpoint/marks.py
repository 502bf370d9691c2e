"""Marks that keep a checkpoint: objects beside its manifest, which itself never changes.

A user sets a pin. A need belongs to another job that starts from the checkpoint and has saved
nothing of its own yet. Marks outlive the processes and jobs that set them. A checkpoint is never
both marked and removed: each side writes its intent before it looks for the other side's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import dataclass

from holdfast_workers.checkpoint.manifest import (
    MANIFEST,
    QUARANTINED,
    REMOVING,
    CheckpointError,
)
from holdfast_workers.checkpoint.storage import ObjectExists, ObjectMissing, Storage, joined

_PINNED = "pinned.mark"
_NEEDED = "needed-by."


class BeingRemoved(CheckpointError):
    """The checkpoint is being removed; a mark would come too late."""


@dataclass(frozen=True)
class Marks:
    pinned: bool
    needed_by: tuple[str, ...]
    """Ids of jobs."""

    def __bool__(self) -> bool:
        return self.pinned or bool(self.needed_by)


def marks_among(names: Collection[str], folder: str = "") -> Marks:
    """The marks of the checkpoint in `folder`, given the names of a storage's objects."""
    prefix = f"{folder}/" if folder else ""
    own = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
    needed = sorted(name.removeprefix(_NEEDED) for name in own if name.startswith(_NEEDED))
    return Marks(_PINNED in own, tuple(needed))


def has_own_marks(names: Collection[str]) -> bool:
    """Whether one of `names` is a mark that Holdfast wrote; the manifest may be gone already."""
    ours = (_PINNED, REMOVING, QUARANTINED)
    return any(name in ours or name.startswith(_NEEDED) for name in names)


def pin(checkpoint: Storage) -> None:
    """Keep a complete checkpoint. Raises BeingRemoved, ObjectMissing."""
    _mark(checkpoint, _PINNED)


def unpin(checkpoint: Storage) -> None:
    checkpoint.delete(_PINNED)


def mark_needed(checkpoint: Storage, job_id: str) -> None:
    """Keep the checkpoint until the job no longer needs it. Raises BeingRemoved, ObjectMissing."""
    _mark(checkpoint, _NEEDED + job_id)


def unmark_needed(checkpoint: Storage, job_id: str) -> None:
    checkpoint.delete(_NEEDED + job_id)


def remove_unmarked(checkpoint: Storage) -> bool:
    """Remove a checkpoint unless it has a mark; at no moment does a part of it look complete.

    Returns False if a mark kept it.
    """
    with contextlib.suppress(ObjectExists):  # left by an interrupted removal
        checkpoint.put_new(REMOVING, b"")
    if marks_among(checkpoint.objects()):
        checkpoint.delete(REMOVING)
        return False
    checkpoint.delete(MANIFEST)
    checkpoint.delete_all()
    return True


def undo_removal(checkpoint: Storage) -> bool:
    """Withdraw a failed removal, so that the checkpoint can be marked again.

    Returns False, and changes nothing, if the manifest is already gone.
    """
    if MANIFEST not in checkpoint.objects():
        return False
    checkpoint.delete(REMOVING)
    return True


def _mark(checkpoint: Storage, name: str) -> None:
    _require_manifest(checkpoint.objects(), checkpoint)  # never mark an empty folder
    created = True
    try:
        checkpoint.put_new(name, b"")
    except ObjectExists:
        created = False
    present = checkpoint.objects()
    if MANIFEST in present and REMOVING not in present:
        return
    if created:  # another call's mark may have prevented the removal
        checkpoint.delete(name)
    _require_manifest(present, checkpoint)
    raise BeingRemoved(f"{checkpoint.uri} is being removed")


def _require_manifest(present: Collection[str], checkpoint: Storage) -> None:
    if MANIFEST not in present:
        raise ObjectMissing(joined(checkpoint.uri, MANIFEST))
