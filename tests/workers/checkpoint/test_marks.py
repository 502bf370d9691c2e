from __future__ import annotations

import pytest
from tests.support.checkpoint.saved_worlds import save_world

from holdfast_workers.checkpoint.manifest import list_checkpoints, verify
from holdfast_workers.checkpoint.marks import (
    BeingRemoved,
    marks_among,
    need,
    need_no_more,
    pin,
    remove_unmarked,
    unpin,
)
from holdfast_workers.checkpoint.storage import ObjectMissing, Storage

ONE = {"dp_shard": 1, "tp": 1}


def test_what_bears_a_mark_is_not_removed_until_it_has_none(root: Storage) -> None:
    at = root.below(save_world(root, 3, 1, ONE).folder)
    pin(at)
    pin(at)
    need(at, "job-b")
    assert marks_among(root.objects(), "step-00000003.attempt-1") == marks_among(at.objects())
    assert marks_among(at.objects()).needed_by == ("job-b",)
    assert not remove_unmarked(at)
    unpin(at)
    assert not remove_unmarked(at)
    verify(at)
    pin(at)  # an attempt to remove it leaves nothing that keeps others from marking it
    unpin(at)
    need_no_more(at, "job-b")
    need_no_more(at, "job-b")
    assert remove_unmarked(at)
    assert list_checkpoints(root) == []
    assert root.folders() == []


def test_what_is_no_checkpoint_takes_no_mark(root: Storage) -> None:
    with pytest.raises(ObjectMissing):
        pin(root.below("step-00000003.attempt-1"))
    assert root.objects() == {}
    assert root.folders() == []


def test_a_mark_and_a_removal_never_both_succeed(root: Storage) -> None:
    """Whatever one side does between two operations of the other, at each of them."""
    for cut in range(12):
        at = root.below(save_world(root, cut + 1, 1, ONE).folder)
        interrupted = _Interrupted(at, cut, lambda at=at: _try_pin(at))
        removed = remove_unmarked(interrupted)
        pinned = interrupted.outcome if interrupted.reached else _try_pin(at)
        assert not (removed and pinned)
        assert removed or marks_among(at.objects()).pinned or not pinned
        if not removed:
            verify(at)


def test_a_pin_that_comes_too_late_leaves_the_mark_of_the_one_before(root: Storage) -> None:
    at = root.below(save_world(root, 3, 1, ONE).folder)
    pin(at)
    at.put_new("removing.mark", b"")  # the removal has yet to find the first pin
    with pytest.raises(BeingRemoved):
        pin(at)
    assert not remove_unmarked(at)


def _try_pin(at: Storage) -> bool:
    try:
        pin(at)
    except (BeingRemoved, ObjectMissing):
        return False
    return True


class _Interrupted:
    """A storage between two of whose operations somebody else does something."""

    def __init__(self, at: Storage, cut: int, other) -> None:  # type: ignore[no-untyped-def]
        self._at, self._left, self._other = at, cut, other
        self.reached = False
        self.outcome = False

    def __getattr__(self, name: str):  # type: ignore[no-untyped-def]
        found = getattr(self._at, name)
        if not callable(found):
            return found

        def call(*arguments: object) -> object:
            if self._left == 0 and not self.reached:
                self.reached = True
                self.outcome = self._other()
            self._left -= 1
            return found(*arguments)

        return call
