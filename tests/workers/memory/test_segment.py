from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from tests.support.memory.shm import content, layout_of, write

from holdfast_workers.memory import segment as module
from holdfast_workers.memory.segment import (
    BadSegment,
    Overwritten,
    Segment,
    SegmentError,
    SegmentSpaceError,
)

NBYTES = 100_000


def _steps(segment: Segment) -> list[tuple[int, int]]:
    return [(commit.attempt, commit.step) for commit in segment.commits()]


def _word_at(slot: int) -> int:
    return module._WORDS_AT + slot * module._WORD_STRIDE


def test_a_commit_is_seen_by_another_mapping_with_the_same_bytes(shm: Path) -> None:
    path = shm / "own-0.seg"
    with Segment.create(path, layout_of(NBYTES)) as writer:
        assert writer.commits() == []
        write(writer, 1, 1)
        with Segment.open(path, writable=False) as reader:
            (commit,) = reader.commits()
            assert (commit.attempt, commit.step, commit.nbytes) == (1, 1, NBYTES)
            assert bytes(reader.payload(commit)) == content(NBYTES, 1, 1)
            assert reader.verify(commit)
            assert reader.layout == layout_of(NBYTES)
            with pytest.raises(SegmentError, match="reading only"):
                reader.begin(2)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_last_two_steps_are_held_newest_first(shm: Path) -> None:
    with Segment.create(shm / "own-0.seg", layout_of(NBYTES)) as segment:
        for step in range(1, 6):
            write(segment, 1, step)
            assert _steps(segment) == [(1, held) for held in (step, step - 1) if held]


def test_begin_prefers_a_slot_without_a_complete_state(shm: Path) -> None:
    with Segment.create(shm / "own-0.seg", layout_of(NBYTES)) as segment:
        write(segment, 1, 10)
        segment.begin(10)  # the same step again, and the writer dies
        assert _steps(segment) == [(1, 10)]
        write(segment, 1, 11)
        segment.begin(11)
        assert _steps(segment) == [(1, 10)]


def test_after_a_rollback_the_stale_later_step_is_overwritten_first(shm: Path) -> None:
    """The order of writing decides, not the step, even after a rollback to a far older step."""
    with Segment.create(shm / "own-0.seg", layout_of(NBYTES)) as segment:
        write(segment, 1, 11)
        write(segment, 1, 12)
        write(segment, 2, 6)
        assert _steps(segment) == [(2, 6), (1, 12)]
        write(segment, 2, 7)
        assert _steps(segment) == [(2, 7), (2, 6)]


def test_a_state_rolled_back_to_outlives_the_later_state(shm: Path) -> None:
    """Rollback to step 10, which a slot still holds: the next step must replace step 15."""
    with Segment.create(shm / "own-0.seg", layout_of(NBYTES)) as segment:
        restored = write(segment, 1, 10)
        write(segment, 1, 15)
        segment.make_newest(restored)
        assert _steps(segment) == [(1, 10), (1, 15)]
        assert segment.verify(restored)
        segment.begin(14)
        assert _steps(segment) == [(1, 10)]


def test_training_may_alternate_between_the_same_two_states(shm: Path) -> None:
    with Segment.create(shm / "own-0.seg", layout_of(NBYTES)) as segment:
        write(segment, 1, 1)
        write(segment, 1, 2)
        for _ in range(5):
            older = segment.commits()[1]
            segment.make_newest(older)
            assert segment.commits()[0] == older
        write(segment, 2, 3)
        assert _steps(segment) == [(2, 3), (older.attempt, older.step)]


def test_a_commit_without_begin_is_refused(shm: Path) -> None:
    with (
        Segment.create(shm / "own-0.seg", layout_of(NBYTES)) as segment,
        pytest.raises(SegmentError, match="without begin"),
    ):
        segment.commit(attempt=1, step=1, digest="0" * 32)


def test_a_reader_detects_that_its_commit_was_overwritten(shm: Path) -> None:
    with Segment.create(shm / "own-0.seg", layout_of(NBYTES)) as segment:
        first = write(segment, 1, 1)
        view = segment.payload(first)
        write(segment, 1, 2)
        assert segment.is_current(first)
        segment.begin(3)
        assert not segment.is_current(first)
        assert not segment.verify(first)
        with pytest.raises(Overwritten):
            segment.payload(first)
        view.release()


def test_the_same_step_committed_again_is_another_commit(shm: Path) -> None:
    """Otherwise a reader could not detect that its slot was overwritten during the read."""
    with Segment.create(shm / "own-0.seg", layout_of(NBYTES)) as segment:
        write(segment, 1, 1)
        first = write(segment, 1, 2)
        again = write(segment, 1, 2)
        assert again.slot == first.slot
        assert not segment.is_current(first)


@pytest.mark.parametrize("byte", range(4 + 4 * 8 + 16 + 4))
def test_a_torn_commit_word_is_not_a_commit(shm: Path, byte: int) -> None:
    path = shm / "own-0.seg"
    with Segment.create(path, layout_of(1000)) as segment:
        write(segment, 1, 1)
        newest = write(segment, 1, 2)
        with path.open("r+b") as file:
            file.seek(_word_at(newest.slot) + byte)
            old = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([old[0] ^ 0x10]))
        assert _steps(segment) == [(1, 1)]


def test_a_pinned_slot_is_not_overwritten_before_its_deadline(shm: Path) -> None:
    with Segment.create(shm / "own-0.seg", layout_of(NBYTES)) as segment:
        first = write(segment, 1, 1)
        segment.pin(first, 60.0)
        for step in (2, 3, 4):
            write(segment, 1, step)
        assert _steps(segment) == [(1, 4), (1, 1)]
        segment.pin(first, 0.0)
        write(segment, 1, 5)
        assert _steps(segment) == [(1, 5), (1, 4)]
    segment.unpin()  # as by a reader that ends after its store closed


@pytest.mark.parametrize("damage", ["magic", "layout", "cut", "empty"])
def test_a_file_that_is_not_an_intact_segment_is_rejected(shm: Path, damage: str) -> None:
    path = shm / "own-0.seg"
    Segment.create(path, layout_of(NBYTES)).close()
    with path.open("r+b") as file:
        if damage == "cut":
            file.truncate(NBYTES)
        elif damage == "empty":
            file.truncate(0)
        else:
            file.seek(0 if damage == "magic" else module.PAGE + 5)
            file.write(b"x")
    with pytest.raises(BadSegment):
        Segment.open(path)


def test_full_shared_memory_raises_a_clear_error_and_leaves_no_file(shm: Path) -> None:
    free = os.statvfs(shm)
    nbytes = free.f_bavail * free.f_frsize
    with pytest.raises(SegmentSpaceError, match="bytes are free"):
        Segment.create(shm / "own-0.seg", layout_of(nbytes))
    assert list(shm.iterdir()) == []


def test_closing_a_segment_with_open_views_is_harmless(shm: Path) -> None:
    segment = Segment.create(shm / "own-0.seg", layout_of(NBYTES))
    commit = write(segment, 1, 1)
    view = segment.payload(commit)
    segment.close()
    assert bytes(view) == content(NBYTES, 1, 1)


def test_file_exists_is_false_after_the_file_is_removed_or_replaced(shm: Path) -> None:
    path = shm / "own-0.seg"
    with Segment.create(path, layout_of(NBYTES)) as segment, Segment.open(path) as reader:
        assert (segment.file_exists, reader.file_exists) == (True, True)
        path.unlink()
        assert (segment.file_exists, reader.file_exists) == (False, False)
        with Segment.create(path, layout_of(NBYTES)) as replacement:
            assert (replacement.file_exists, segment.file_exists) == (True, False)
