"""Marks beside a checkpoint's manifest: that it is to stay, and for whom. They outlive everybody.

A pin is its user's; a need is that of another job, which was told to start from here and has
saved nothing of its own yet. The manifest itself never changes. Marking and removing are never
both done: each side writes down what it is about to do before it looks for the other.
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
    """It is on its way out; what is marked now would come too late."""


@dataclass(frozen=True)
class Marks:
    pinned: bool
    needed_by: tuple[str, ...]
    """Ids of jobs."""

    def __bool__(self) -> bool:
        return self.pinned or bool(self.needed_by)


def marks_among(names: Collection[str], folder: str = "") -> Marks:
    """The marks of the checkpoint in `folder`, by the names of the objects of a storage."""
    prefix = f"{folder}/" if folder else ""
    own = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
    needed = sorted(name.removeprefix(_NEEDED) for name in own if name.startswith(_NEEDED))
    return Marks(_PINNED in own, tuple(needed))


def was_ours(names: Collection[str]) -> bool:
    """Whether one of us has left a word here, whatever else is there or is gone."""
    ours = (_PINNED, REMOVING, QUARANTINED)
    return any(name in ours or name.startswith(_NEEDED) for name in names)


def pin(at: Storage) -> None:
    """Let the complete checkpoint in `at` stay. Raises BeingRemoved, ObjectMissing."""
    _mark(at, _PINNED)


def unpin(at: Storage) -> None:
    at.delete(_PINNED)


def need(at: Storage, job_id: str) -> None:
    """Let it stay until the job needs it no more. Raises BeingRemoved, ObjectMissing."""
    _mark(at, _NEEDED + job_id)


def need_no_more(at: Storage, job_id: str) -> None:
    at.delete(_NEEDED + job_id)


def remove_unmarked(at: Storage) -> bool:
    """Remove a checkpoint unless it bears a mark; at no moment does a part of it look whole.

    False if it was left, because of its marks.
    """
    with contextlib.suppress(ObjectExists):  # a removal that was broken off
        at.put_new(REMOVING, b"")
    if marks_among(at.objects()):
        at.delete(REMOVING)
        return False
    at.delete(MANIFEST)
    at.delete_all()
    return True


def undo_removal(at: Storage) -> bool:
    """After a removal that failed: whether the checkpoint is whole still. It may be marked then."""
    if MANIFEST not in at.objects():
        return False
    at.delete(REMOVING)
    return True


def _mark(at: Storage, name: str) -> None:
    _require_manifest(at.objects(), at)  # no mark is left where nothing is
    made = True
    try:
        at.put_new(name, b"")
    except ObjectExists:
        made = False
    present = at.objects()
    if MANIFEST in present and REMOVING not in present:
        return
    if made:  # that of another call may have kept the removal from happening
        at.delete(name)
    _require_manifest(present, at)
    raise BeingRemoved(f"{at.uri} is being removed")


def _require_manifest(present: Collection[str], at: Storage) -> None:
    if MANIFEST not in present:
        raise ObjectMissing(joined(at.uri, MANIFEST))
