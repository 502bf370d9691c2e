"""Crash points of memory checkpoints: kills, torn writes and bit flips at every write."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from tests.support.faults.crash_point_list import CrashPoints, seeded_runs
from tests.support.faults.crash_states import (
    Files,
    FolderRecorder,
    Moment,
    flipped,
    put_files,
    torn,
)
from tests.support.memory.memory_states import (
    MESH,
    OTHER_SIZES,
    RANK,
    SIZES,
    RecoveredNode,
    Saved,
    layout_of,
    open_or_create,
    save,
)

from holdfast_workers.memory import frozen_copies
from holdfast_workers.memory import segment as segment_module
from holdfast_workers.memory import segment_store as store_module
from holdfast_workers.memory.segment import Segment
from holdfast_workers.memory.segment_store import SegmentStore
from holdfast_workers.protocol.messages import Place
from holdfast_workers.state import rank_state
from holdfast_workers.worker import rank_checkpoints

WATCHED = (segment_module, store_module, rank_state, rank_checkpoints)
CUTS = 24

Scenario = Callable[[FolderRecorder, Path], list[Saved]]
"""Drives the real code in a folder; returns the states that it saved."""


def _saves(recorder: FolderRecorder, root: Path) -> list[Saved]:
    """A new segment, and a few steps."""
    steps = [Saved(1, step) for step in range(1, 5)]
    segment = open_or_create(_own(root))
    for saved in steps:
        save(segment, saved)
        recorder.now_holds(saved)
    segment.close()
    return steps


def _rollback(recorder: FolderRecorder, root: Path) -> list[Saved]:
    """Steps 5 and 8, a rollback to 5, and other steps from there by another attempt."""
    first, lost, next_, last = Saved(1, 5), Saved(1, 8), Saved(2, 7), Saved(2, 9)
    segment = open_or_create(_own(root))
    restored = save(segment, first)
    save(segment, lost)
    recorder.now_holds(first)
    segment.make_newest(restored)
    save(segment, next_)
    recorder.now_holds(first, next_)
    recorder.now_holds(next_)
    save(segment, last)
    recorder.now_holds(last)
    segment.close()
    return [first, lost, next_, last]


def _pinned(recorder: FolderRecorder, root: Path) -> list[Saved]:
    """A push pins the older commit while the worker continues to save."""
    steps = [Saved(1, step) for step in range(1, 5)]
    segment = open_or_create(_own(root))
    older = save(segment, steps[0])
    save(segment, steps[1])
    recorder.now_holds(steps[0])
    segment.pin(older, 5.0)
    save(segment, steps[2])
    recorder.now_holds(steps[0], steps[2])
    segment.unpin()
    recorder.now_holds(steps[2])
    save(segment, steps[3])
    recorder.now_holds(steps[3])
    segment.close()
    return steps


def _dead_reader(recorder: FolderRecorder, root: Path) -> list[Saved]:
    """The reader that pinned the older commit has died, and its pin has expired."""
    steps = [Saved(1, step) for step in (1, 2)]
    segment = open_or_create(_own(root))
    older = save(segment, steps[0])
    save(segment, steps[1])
    segment.pin(older, 0.0)
    recorder.now_holds(*steps)
    segment.close()
    return steps


def _adopted(recorder: FolderRecorder, root: Path) -> list[Saved]:
    """The rank moves to the node that keeps its replica."""
    store = SegmentStore(root, MESH)
    steps = [Saved(1, 3), Saved(1, 4), Saved(2, 5)]
    with Segment.create(store.path(RANK, Place.REPLICA), layout_of(SIZES)) as replica:
        for saved in steps[:2]:
            save(replica, saved)
    recorder.now_holds(*steps[:2])
    store.adopt(RANK)
    segment = open_or_create(_own(root))
    recorder.now_holds(steps[1])
    save(segment, steps[2])
    recorder.now_holds(steps[2])
    store.close()
    segment.close()
    return steps


def _quarantined(recorder: FolderRecorder, root: Path) -> list[Saved]:
    """One of two commits is quarantined, and its slot is used again."""
    steps = [Saved(1, step) for step in range(1, 4)]
    segment = open_or_create(_own(root))
    for saved in steps[:2]:
        save(segment, saved)
    recorder.now_holds(steps[0])
    segment.quarantine(segment.commits()[0])
    save(segment, steps[2])
    recorder.now_holds(steps[2])
    segment.close()
    return steps


def _other_model(recorder: FolderRecorder, root: Path) -> list[Saved]:
    """The existing segment has another layout and is replaced."""
    old, new = Saved(1, 1, sizes=OTHER_SIZES), Saved(2, 2)
    segment = open_or_create(_own(root), OTHER_SIZES)
    save(segment, old)
    segment.close()
    segment = open_or_create(_own(root))
    save(segment, new)
    recorder.now_holds(new)
    segment.close()
    return [old, new]


def _frozen_copy(recorder: FolderRecorder, root: Path) -> list[Saved]:
    """A frozen copy for the saver is left beside the memory checkpoint."""
    saved = Saved(1, 3)
    segment = open_or_create(_own(root))
    save(segment, saved)
    recorder.now_holds(saved)
    path = frozen_copies.copy_path(root, RANK, saved.step, saved.attempt)
    with Segment.create(path, segment.layout) as copy:
        save(copy, saved)
    segment.close()
    return [saved]


SCENARIOS = (
    _saves,
    _rollback,
    _pinned,
    _dead_reader,
    _adopted,
    _quarantined,
    _other_model,
    _frozen_copy,
)


def _own(root: Path) -> Path:
    path = root / MESH / f"own-{RANK}.seg"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


@pytest.fixture(scope="module")
def dead_pid() -> int:
    """Pid of a process that has ended, in whose name the scenarios run."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return pid


def _record_scenario(
    scenario: Scenario, root: Path, dead_pid: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Moment], list[Saved]]:
    """Every state that the folder passes through in the scenario, run under a dead pid."""
    root.mkdir()
    recorder = FolderRecorder(root, WATCHED)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: dead_pid)
        with recorder.recording():
            known = scenario(recorder, root)
    return recorder.moments, known


def _record_all(
    root: Path, dead_pid: int, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[list[Moment], list[Saved]]]:
    return [
        _record_scenario(scenario, root / scenario.__name__, dead_pid, monkeypatch)
        for scenario in SCENARIOS
    ]


def _check_killed(moment: Moment, known: list[Saved], root: Path) -> None:
    put_files(root, moment.files)
    node = RecoveredNode(root)
    try:
        # The leftovers of a kill are not commits: no digest is needed to reject them.
        node.check(known, moment.must_hold, verified=False)
        node.check(known, moment.must_hold, verified=True)
        node.save_next(known)
        assert node.bad == [], "the leftovers of a kill were reported as damage"
    except AssertionError as error:
        raise AssertionError(f"killed at {moment.line}: {error}") from error
    finally:
        node.close()


@pytest.mark.seconds
@seeded_runs
def test_a_kill_at_any_write_leaves_exactly_the_committed_states(
    shm: Path, dead_pid: int, monkeypatch: pytest.MonkeyPatch, run: int
) -> None:
    points = CrashPoints("segments: killed or torn", run)
    for moments, known in _record_all(shm, dead_pid, monkeypatch):
        for before, after in pairwise(moments):
            _check_killed(before, known, shm / "work")
            points.tried += 1
            for torn_state in torn(before, after, points.random, CUTS):
                _check_killed(torn_state, known, shm / "work")
                points.tried += 1
    points.assert_enough()


def _metadata_bits(content: bytes) -> list[int]:
    """Every bit of the header, the commit words, the pin, the counter and the layout."""
    layout_bytes = segment_module._HEADER.unpack_from(content)[2]
    word = segment_module._WORD.size + segment_module._CRC.size
    spans = [
        (0, segment_module._HEADER_CRC_AT + segment_module._CRC.size),
        (segment_module._PIN_AT, segment_module._PIN.size),
        (segment_module._COUNTER_AT, segment_module._COUNTER.size),
        (segment_module.PAGE, layout_bytes),
    ]
    for slot in range(segment_module.SLOTS):
        spans.append((segment_module._WORDS_AT + slot * segment_module._WORD_STRIDE, word))
    return [bit for at, length in spans for bit in range(8 * at, 8 * (at + length))]


def _untouched(path: Path, known: list[Saved], bit: int) -> list[Saved]:
    """The commits that must survive a flip of `bit`: all except the commit whose word or payload
    contains it; none if it is in the header or the layout, on which both depend."""
    with Segment.open(path, writable=False) as segment:
        layout_bytes = segment_module._HEADER.unpack_from(segment._view)[2]
        whole = [(0, segment_module._HEADER_CRC_AT + segment_module._CRC.size)]
        whole.append((segment_module.PAGE, layout_bytes))
        if any(at <= bit // 8 < at + length for at, length in whole):
            return []
        survivors = []
        for commit in segment.commits():
            word_at = segment_module._WORDS_AT + commit.slot * segment_module._WORD_STRIDE
            own = [
                (word_at, segment_module._WORD.size + segment_module._CRC.size),
                (segment._slots[commit.slot], commit.nbytes),
            ]
            if not any(at <= bit // 8 < at + length for at, length in own):
                survivors.append((commit.attempt, commit.step))
    return [saved for saved in known if (saved.attempt, saved.step) in survivors]


def _check_damaged(files: Files, must_hold: list[Saved], known: list[Saved], root: Path) -> None:
    put_files(root, files)
    node = RecoveredNode(root)
    node.check(known, must_hold, verified=True)
    node.check(known, must_hold, verified=True)
    assert len(node.bad) <= 1, "one damage was reported twice"
    node.save_next(known)
    node.close()


@pytest.mark.slow
@seeded_runs
def test_a_flipped_bit_costs_only_its_own_state_and_is_never_loaded(
    shm: Path, dead_pid: int, monkeypatch: pytest.MonkeyPatch, run: int
) -> None:
    points = CrashPoints("segments: flipped or cut", run)
    name = f"{MESH}/own-{RANK}.seg"
    for scenario in (_saves, _rollback, _dead_reader):
        moments, known = _record_scenario(scenario, shm / scenario.__name__, dead_pid, monkeypatch)
        content = moments[-1].files[name]
        metadata = _metadata_bits(content)
        anywhere = points.random.sample(range(8 * len(content)), 500)
        for bit in [*points.random.sample(metadata, len(metadata) // 3), *anywhere]:
            must_hold = _untouched(shm / scenario.__name__ / name, known, bit)
            _check_damaged({name: flipped(content, bit)}, must_hold, known, shm / "work")
            points.tried += 1
        for length in points.random.sample(range(len(content)), 100):
            _check_damaged({name: content[:length]}, [], known, shm / "work")
            points.tried += 1
    points.assert_enough()
