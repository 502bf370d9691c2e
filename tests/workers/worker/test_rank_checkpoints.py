"""A rank's checkpoints if shared memory is full, provoked by a size that no machine has."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.memory.memory_states import Saved, layout_of, payload_of, snapshot_of
from tests.support.nodes.agent_config import join_order
from tests.workers.state.test_object_room import state_of
from tests.workers.state.test_rank_state import SMALL

from holdfast_workers.fault_injection.fault_points import FaultPoints
from holdfast_workers.memory.segment import Segment, SegmentSpaceError
from holdfast_workers.protocol.processes import (
    CommittedToMemory,
    FrozenCopy,
    WorkerMessage,
    WorkerSignal,
)
from holdfast_workers.protocol.signals import ShardFailed
from holdfast_workers.state.digest import payload_digest
from holdfast_workers.state.layout import StateLayout
from holdfast_workers.worker.rank_checkpoints import RankCheckpoints

SAVED = Saved(attempt=2, step=5)
Messages = list[WorkerMessage]


def without_room_for_copies(
    root: Path, sent: Messages, monkeypatch: pytest.MonkeyPatch
) -> RankCheckpoints:
    """A rank with its own segment, for which a saver's copy appears far too large."""
    segment = Segment.create(root / "own-0.seg", layout_of(SAVED.sizes))
    checkpoints = RankCheckpoints(
        join_order(segment.path, attempt=SAVED.attempt),
        sent.append,
        FaultPoints(None),
    )
    with segment.begin(4) as slot:
        digest = snapshot_of(SAVED).write(slot)
    checkpoints.adopt_commit(segment, segment.commit(attempt=1, step=4, digest=digest))
    create = Segment.create
    monkeypatch.setattr(Segment, "create", lambda path, _: create(path, layout_of((1 << 50,))))
    return checkpoints


@pytest.mark.parametrize("to_memory", [True, False])
def test_a_copy_that_does_not_fit_is_skipped_and_training_continues(
    shm: Path, to_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: Messages = []
    own = without_room_for_copies(shm, sent, monkeypatch)
    digest = own.start(snapshot_of(SAVED), 5, to_memory=to_memory, metrics={}, last=False)
    assert digest().whole == payload_digest(payload_of(SAVED))
    own.finish()
    *committed, unsaved = sent
    assert committed == [CommittedToMemory(2, 5)] * to_memory
    assert isinstance(unsaved, WorkerSignal) and isinstance(unsaved.detail, ShardFailed)
    assert unsaved.detail.step == 5
    assert "bytes are free" in unsaved.detail.message
    assert [path.name for path in shm.iterdir()] == ["own-0.seg"]
    assert not own.has_pending_saves()
    own.end(0.0)


def test_a_save_is_pending_from_its_start_until_its_copy_is_gone(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: Messages = []
    begun, create = threading.Event(), Segment.create

    def create_later(path: Path, layout: StateLayout) -> Segment:
        assert begun.wait(60)
        return create(path, layout)

    monkeypatch.setattr(Segment, "create", create_later)
    order = join_order(shm / "own-0.seg", attempt=SAVED.attempt)
    own = RankCheckpoints(order, sent.append, FaultPoints(None))
    own.start(snapshot_of(SAVED), 5, to_memory=False, metrics={}, last=False)
    assert own.has_pending_saves()  # no file exists yet
    begun.set()
    own.finish()
    (frozen,) = sent
    assert isinstance(frozen, FrozenCopy)
    assert own.has_pending_saves()
    Path(frozen.path).unlink()
    assert not own.has_pending_saves()
    own.end(0.0)


def test_a_last_copy_that_does_not_fit_raises_an_error(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: Messages = []
    own = without_room_for_copies(shm, sent, monkeypatch)
    own.start(snapshot_of(SAVED), 5, to_memory=True, metrics={}, last=True)
    with pytest.raises(SegmentSpaceError, match="bytes are free"):
        own.finish()
    assert sent == [CommittedToMemory(2, 5)]
    own.end(0.0)


def test_a_state_that_outgrows_its_room_leaves_the_step_before_beside_the_new_one(
    shm: Path,
) -> None:
    order = join_order(shm / "own-0.seg", attempt=2)
    sent: Messages = []
    own = RankCheckpoints(order, sent.append, FaultPoints(None))
    states = {4: state_of(b"a" * 20, 64), 5: state_of(b"a" * 200, 256), 6: state_of(b"b", 256)}
    for step, kept in ((4, [4]), (5, [5, 4]), (6, [6, 5])):
        snapshot = states[step].freeze(SMALL)
        assert own.write_memory(snapshot, step)[1].whole == states[step].digest(SMALL)
        with Segment.open(shm / "own-0.seg", writable=False) as segment:
            assert [commit.step for commit in segment.commits() if segment.verify(commit)] == kept
            assert segment.layout == snapshot.layout
    own.end(0.0)


class _Killed:
    """The state of a rank that is killed while it copies it."""

    layout = layout_of(SAVED.sizes)

    def copy_to(self, *_: object) -> str:
        raise InterruptedError


def test_a_reader_of_the_older_step_costs_a_rank_never_its_newest(shm: Path) -> None:
    """Both ranks copy step 3. Rank 0, whose step 1 is still being read, is killed: a step stays
    that both have."""
    ranks, sent = [], Messages()
    for rank in (0, 1):
        order = join_order(shm / f"own-{rank}.seg", attempt=SAVED.attempt)
        own = RankCheckpoints(order, sent.append, FaultPoints(None))
        for step in (1, 2):
            own.write_memory(snapshot_of(replace(SAVED, step=step)), step)
        ranks.append(own)
    assert ranks[0].step_being_read() is None
    with Segment.open(shm / "own-0.seg") as reader:
        reader.pin(reader.commits()[1], for_s=60)
    assert [own.step_being_read() for own in ranks] == [1, None]  # no step is due meanwhile
    with pytest.raises(InterruptedError):
        ranks[0].write_memory(_Killed(), 3)  # type: ignore[arg-type]
    ranks[1].write_memory(snapshot_of(replace(SAVED, step=3)), 3)
    left = [
        {commit.step for commit in own.segment(layout_of(SAVED.sizes)).commits()} for own in ranks
    ]
    assert left == [{2}, {2, 3}]
    for own in ranks:
        own.end(0.0)
