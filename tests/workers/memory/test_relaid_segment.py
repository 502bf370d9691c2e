"""A segment gets another room for objects and keeps its newest step, whatever happens meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.memory.data_nodes import Node
from tests.support.waiting import eventually
from tests.workers.state.test_object_room import payload_of, state_of
from tests.workers.state.test_rank_state import SMALL

from holdfast_workers.memory import relaid_segment
from holdfast_workers.memory.relaid_segment import relaid
from holdfast_workers.memory.segment import Commit, Segment, SegmentSpaceError
from holdfast_workers.protocol.messages import Place
from holdfast_workers.state.layout import StateLayout
from holdfast_workers.state.object_room import LENGTH_BYTES, rooms, with_rooms
from holdfast_workers.state.rank_state import RankState

SMALLER, LARGER = 64, 256


def state_at(step: int, room: int) -> RankState:
    return state_of(f"step {step}".encode(), room, float(step))


def save(segment: Segment, step: int, room: int) -> Commit:
    with segment.begin(step) as slot:
        digest = state_at(step, room).freeze(SMALL).write(slot)
    return segment.commit(attempt=1, step=step, digest=digest)


def found(segment: Segment, room: int) -> list[int]:
    """The steps that it contains, as that room makes them."""
    steps = []
    for commit in segment.commits():
        assert segment.verify(commit)
        payload = bytearray(segment.payload(commit))
        entry = segment.layout.tensors[1]
        mark = entry.offset + entry.nbytes - LENGTH_BYTES
        payload[mark : mark + LENGTH_BYTES] = bytes(LENGTH_BYTES)
        assert payload == payload_of(state_at(commit.step, room))
        steps.append(commit.step)
    return steps


@pytest.fixture
def former(shm: Path) -> Segment:
    segment = Segment.create(shm / "own-0.seg", state_at(1, SMALLER).layout)
    save(segment, 1, SMALLER)
    save(segment, 2, SMALLER)
    return segment


@pytest.fixture
def layout() -> StateLayout:
    return state_at(1, LARGER).layout


def test_the_newest_step_is_kept_and_the_next_one_is_written_beside_it(
    former: Segment, layout: StateLayout, shm: Path
) -> None:
    segment = relaid(former, layout)
    assert found(segment, LARGER) == [2]
    assert found(former, SMALLER) == [2, 1]  # for readers that have it mapped
    save(segment, 3, LARGER)
    with Segment.open(shm / "own-0.seg") as opened:
        assert found(opened, LARGER) == [3, 2]
    assert [path.name for path in shm.iterdir()] == ["own-0.seg"]


def test_room_can_be_given_back(former: Segment, layout: StateLayout) -> None:
    segment = relaid(relaid(former, layout), state_at(1, SMALLER).layout)
    assert found(segment, SMALLER) == [2]


def test_until_the_step_is_kept_the_former_segment_stays_in_its_place(
    former: Segment, layout: StateLayout, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(relaid_segment, "payload_digest", fail)
    with pytest.raises(KeyboardInterrupt):
        relaid(former, layout)
    with Segment.open(shm / "own-0.seg") as opened:
        assert found(opened, SMALLER) == [2, 1]
    assert [path.name for path in shm.iterdir()] == ["own-0.seg"]


def test_a_damaged_step_does_not_become_whole(former: Segment, layout: StateLayout) -> None:
    former._slot(former.commits()[0].slot)[5] ^= 1
    assert relaid(former, layout).commits() == []


def test_nothing_of_another_model_is_kept(former: Segment) -> None:
    other = StateLayout((), 64)
    segment = relaid(former, other)
    assert segment.commits() == [] and segment.layout == other


def test_without_room_for_both_the_former_stays(former: Segment, shm: Path) -> None:
    """To remove it would free nothing: the agent has it mapped, too."""
    with pytest.raises(SegmentSpaceError, match="bytes are free"):
        relaid(former, with_rooms(former.layout, dict.fromkeys(rooms(former.layout), 1 << 50)))
    with Segment.open(shm / "own-0.seg") as opened:
        assert found(opened, SMALLER) == [2, 1]
    assert [path.name for path in shm.iterdir()] == ["own-0.seg"]


def test_a_partner_keeps_the_step_before_while_it_receives_the_first_larger_one(
    node: Callable[..., Node],
) -> None:
    here, there = node("a"), node("b")
    own = here.store.ensure(0, Place.OWN, state_at(1, SMALLER).layout)
    here.replicator.set_partners(0, (there.partner,))
    for step, room in ((1, SMALLER), (2, SMALLER), (3, LARGER)):
        own = here.store.ensure(0, Place.OWN, state_at(1, room).layout)
        save(own, step, room)
        here.replicator.offer(0, 1, step)

        def replicated(step: int = step) -> bool:
            return (0, 1, step) in here.replicated

        eventually(replicated)
    replica = there.store.find(0, Place.REPLICA)
    assert replica is not None
    assert found(replica, LARGER) == found(own, LARGER) == [3, 2]
    assert here.lost == []
