from __future__ import annotations

import pytest
from tests.support.checkpoint.saved_worlds import save_world

from holdfast_workers.checkpoint.manifest import list_checkpoints, verify
from holdfast_workers.checkpoint.marks import (
    BeingRemoved,
    mark_needed,
    marks_among,
    pin,
    remove_unmarked,
    unmark_needed,
    unpin,
)
from holdfast_workers.checkpoint.storage import ObjectMissing, Storage

ONE = {"dp_shard": 1, "tp": 1}


def test_a_marked_checkpoint_is_not_removed_until_all_marks_are_gone(root: Storage) -> None:
    checkpoint = root.below(save_world(root, 3, 1, ONE).folder)
    pin(checkpoint)
    pin(checkpoint)
    mark_needed(checkpoint, "job-b")
    assert marks_among(root.objects(), "step-00000003.attempt-1") == marks_among(
        checkpoint.objects()
    )
    assert marks_among(checkpoint.objects()).needed_by == ("job-b",)
    assert not remove_unmarked(checkpoint)
    unpin(checkpoint)
    assert not remove_unmarked(checkpoint)
    verify(checkpoint)
    pin(checkpoint)  # a failed removal leaves nothing that prevents marks
    unpin(checkpoint)
    unmark_needed(checkpoint, "job-b")
    unmark_needed(checkpoint, "job-b")
    assert remove_unmarked(checkpoint)
    assert list_checkpoints(root) == []
    assert root.folders() == []


def test_an_empty_folder_cannot_be_marked(root: Storage) -> None:
    with pytest.raises(ObjectMissing):
        pin(root.below("step-00000003.attempt-1"))
    assert root.objects() == {}
    assert root.folders() == []


def test_a_mark_and_a_removal_never_both_succeed(root: Storage) -> None:
    """Pins between any two storage operations of a removal."""
    for cut in range(12):
        checkpoint = root.below(save_world(root, cut + 1, 1, ONE).folder)
        interrupted = _Interrupted(
            checkpoint, cut, lambda checkpoint=checkpoint: _try_pin(checkpoint)
        )
        removed = remove_unmarked(interrupted)
        pinned = interrupted.outcome if interrupted.reached else _try_pin(checkpoint)
        assert not (removed and pinned)
        assert removed or marks_among(checkpoint.objects()).pinned or not pinned
        if not removed:
            verify(checkpoint)


def test_a_late_pin_leaves_an_earlier_pin_in_place(root: Storage) -> None:
    checkpoint = root.below(save_world(root, 3, 1, ONE).folder)
    pin(checkpoint)
    checkpoint.put_new("removing.mark", b"")  # a removal that has not seen the first pin yet
    with pytest.raises(BeingRemoved):
        pin(checkpoint)
    assert not remove_unmarked(checkpoint)


def _try_pin(checkpoint: Storage) -> bool:
    try:
        pin(checkpoint)
    except (BeingRemoved, ObjectMissing):
        return False
    return True


class _Interrupted:
    """A storage that calls `other` once, after `cut` operations."""

    def __init__(self, checkpoint: Storage, cut: int, other) -> None:  # type: ignore[no-untyped-def]
        self._storage, self._left, self._other = checkpoint, cut, other
        self.reached = False
        self.outcome = False

    def __getattr__(self, name: str):  # type: ignore[no-untyped-def]
        attribute = getattr(self._storage, name)
        if not callable(attribute):
            return attribute

        def call(*arguments: object) -> object:
            if self._left == 0 and not self.reached:
                self.reached = True
                self.outcome = self._other()
            self._left -= 1
            return attribute(*arguments)

        return call
