"""The segment of a program: it grows without losing the newest step, and is found again."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.memory.shm import layout_of, write

from holdfast_workers.memory.segment import Commit, Segment
from holdfast_workers.program_memory.own_segment import OwnSegment, capacity_for
from holdfast_workers.program_memory.payload import (
    PayloadIndex,
    PayloadKind,
    PayloadPart,
    PayloadWriter,
    needed_bytes,
    read_index,
)

MB = 1 << 20


def newest(own: OwnSegment) -> Commit | None:
    segment = own.current()
    return next(iter(segment.commits()), None) if segment is not None else None


def save(own: OwnSegment, step: int, nbytes: int) -> None:
    index = PayloadIndex(PayloadKind.OBJECT, step, 0, 1, {"part": PayloadPart(nbytes, nbytes)})
    writer = PayloadWriter(own.begin(step, needed_bytes([nbytes], index), newest(own)))
    part = writer.copy(bytes([step]) * nbytes)
    own.commit(step, writer.finish(PayloadIndex(PayloadKind.OBJECT, step, 0, 1, {"part": part})))


def intact_steps(path: Path) -> dict[int, int]:
    """The steps in the segment that verify, and the sizes of their parts."""
    found = {}
    with Segment.open(path, writable=False) as segment:
        for commit in segment.commits():
            assert segment.verify(commit)
            payload = segment.payload(commit)
            part = read_index(payload).parts["part"]
            content = payload[part.offset : part.offset + part.nbytes]
            assert bytes(content) == bytes([commit.step]) * part.nbytes
            found[commit.step] = part.nbytes
    return found


@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.integers(0, 6 * MB), min_size=1, max_size=5))
def test_steps_of_any_size_leave_the_last_two_or_the_last_one(
    sizes: list[int],
) -> None:

    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder) / "own-0.seg"
        own = OwnSegment(path, attempt=1)
        for step, nbytes in enumerate(sizes, 1):
            save(own, step, nbytes)
            found = intact_steps(path)
            assert found == {each: sizes[each - 1] for each in range(max(1, step - 1), step + 1)}
        own.close()


def test_a_new_process_goes_on_with_the_segment(tmp_path: Path) -> None:
    path = tmp_path / "own-0.seg"
    first = OwnSegment(path, attempt=1)
    save(first, 1, 100)
    first.close()
    second = OwnSegment(path, attempt=2)
    save(second, 2, 100)
    assert intact_steps(path) == {1: 100, 2: 100}


def test_a_step_that_is_saved_again_leaves_the_former_one_until_it_is_complete(
    tmp_path: Path,
) -> None:
    path = tmp_path / "own-0.seg"
    own = OwnSegment(path, attempt=1)
    for step in (1, 2):
        save(own, step, 100)
    own.close()
    own = OwnSegment(path, attempt=2)
    own.begin(2, 100, newest(own))  # the program is killed
    assert intact_steps(path) == {2: 100}
    save(own, 2, 100)
    with Segment.open(path, writable=False) as segment:
        assert [commit.attempt for commit in segment.commits()] == [2, 1]


def test_a_reader_of_the_former_step_does_not_turn_a_save_to_the_newest(tmp_path: Path) -> None:
    path = tmp_path / "own-0.seg"
    own = OwnSegment(path, attempt=1)
    for step in (1, 2):
        save(own, step, 100)
    with Segment.open(path) as reader:
        reader.pin(reader.commits()[1], for_s=30)
        own.begin(3, 100, newest(own))
    assert intact_steps(path) == {2: 100}


def test_what_a_killed_program_left_of_a_larger_segment_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "own-0.seg"
    path.with_suffix(".larger").write_bytes(bytes(1000))
    OwnSegment(path, attempt=2)
    assert list(tmp_path.iterdir()) == []


def test_a_segment_that_was_removed_from_outside_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "own-0.seg"
    own = OwnSegment(path, attempt=1)
    save(own, 1, 100)
    path.unlink()
    assert own.current() is None
    save(own, 2, 100)
    assert intact_steps(path) == {2: 100}


def test_a_segment_of_another_layout_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "own-0.seg"
    with Segment.create(path, layout_of(4096)) as other:
        write(other, attempt=1, step=5)
    own = OwnSegment(path, attempt=2)
    assert own.current() is None
    save(own, 6, 100)
    assert intact_steps(path) == {6: 100}


@given(nbytes=st.integers(0, 1 << 45))
def test_a_new_segment_leaves_room_to_grow(nbytes: int) -> None:
    assert nbytes + nbytes // 16 + MB <= capacity_for(nbytes) <= nbytes + nbytes // 16 + MB + 64
