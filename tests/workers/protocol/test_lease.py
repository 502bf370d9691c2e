from __future__ import annotations

import threading
import time
from math import inf
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.support.memory.shm import MESH, SECRET
from tests.support.waiting import eventually

from holdfast_workers.fault_injection.fault_points import FaultPoints
from holdfast_workers.memory.data_server import DataServer
from holdfast_workers.memory.lifeline import Lifelines
from holdfast_workers.memory.segment_store import SegmentStore
from holdfast_workers.progress import beacon as beacons
from holdfast_workers.progress.beacon import Beacon, BeaconReader
from holdfast_workers.progress.hang_limits import Limits
from holdfast_workers.protocol.lease import Grant, Lease, beat, clock_s
from holdfast_workers.spec import DetectionSpec
from holdfast_workers.worker.attempt import Attempt
from holdfast_workers.worker.main import Link


class Told:
    def __init__(self) -> None:
        self.words: list[tuple[int, float]] = []
        self.numbers: list[int] = []

    def __call__(self, attempt: int, until: float, number: int) -> None:
        self.words.append((attempt, until))
        self.numbers.append(number)


def until(lease: Lease, attempt: int) -> float:
    return lease.until(attempt)[0]


def test_a_lease_runs_from_the_beat_that_was_heard_not_from_the_answer() -> None:
    lease = Lease(Told())
    answer = Grant(epoch=3, attempt=2, silence_s=1.5, lease_s=30.0).answering(beat(100.0))
    lease.renew(Grant.unpack(answer))
    assert until(lease, 2) == 101.5
    assert until(lease, 1) == 0.0


def test_grants_out_of_order_take_nothing_back_and_give_nothing_more() -> None:
    lease = Lease(Told())
    for attempt, heard, ends in [(2, 100.0, 110.0), (2, 90.0, 110.0), (1, 500.0, 110.0)]:
        lease.renew(Grant(1, attempt, 10.0, 30.0, heard))
        assert until(lease, 2) == ends
    lease.renew(Grant(1, 3, 10.0, 30.0, 95.0))
    assert (until(lease, 2), until(lease, 3)) == (0.0, 105.0)


def test_only_the_end_of_the_supervisor_that_granted_the_lease_makes_it_longer() -> None:
    told = Told()
    lease = Lease(told)
    lease.renew(Grant(2, 1, 1.5, 10.0, 100.0))
    lease.supervisor_ended(1, 101.0)
    assert until(lease, 1) == 101.5
    lease.supervisor_ended(2, 101.0)
    assert until(lease, 1) == 110.0
    assert told.words[-1] == (1, 110.0)


def test_who_sees_its_supervisor_end_too_late_may_have_been_given_up() -> None:
    lease = Lease(Told())
    lease.renew(Grant(2, 1, 1.5, 10.0, 100.0))
    lease.supervisor_ended(2, 101.6)
    assert until(lease, 1) == 101.5


def test_who_was_let_go_takes_the_end_of_the_connection_for_nothing() -> None:
    lease = Lease(Told())
    lease.renew(Grant(2, 1, 1.5, 10.0, 100.0))
    lease.renew(Grant(2, 1, 0.0, 0.0, 100.0))
    lease.supervisor_ended(2, 101.0)
    assert until(lease, 1) == 101.5


def test_a_successor_ends_what_its_predecessors_end_had_given() -> None:
    told = Told()
    lease = Lease(told)
    lease.renew(Grant(2, 1, 1.5, 10.0, 100.0))
    lease.supervisor_ended(2, 101.0)
    lease.taken_over(3, 104.0)
    assert until(lease, 1) == 105.5
    assert told.words[-1] == (1, 105.5)
    lease.renew(Grant(2, 1, 1.5, 10.0, 104.2))  # under way since before
    lease.supervisor_ended(2, 104.5)
    assert until(lease, 1) == 105.5
    assert told.numbers == sorted(set(told.numbers))


def test_workers_are_told_long_before_their_lease_ends_and_not_at_every_beat() -> None:
    told = Told()
    lease = Lease(told)
    for number in range(401):
        lease.renew(Grant(1, 1, 8.0, 30.0, number * 0.25))
        assert told.words[-1][1] > number * 0.25 + 6.5
    assert len(told.words) == 101
    lease.renew(Grant(1, 2, 8.0, 30.0, 100.1))
    assert told.words[-1] == (2, 108.1)


class Server:
    """A data server whose grants are kept, and a lifeline to it."""

    def __init__(self, root: Path) -> None:
        self.grants: list[Grant] = []
        self.ended: list[int] = []
        self.lost: list[str] = []
        self.server = DataServer(
            SegmentStore(root, MESH),
            SECRET,
            "127.0.0.1",
            on_grant=self.grants.append,
            on_supervisor_end=self.ended.append,
            heartbeat_s=0.05,
        )
        self.lines = Lifelines(SECRET, lambda agent, why: self.lost.append(why), 1.0)
        self.lines.watch("n0", "127.0.0.1", self.server.port)

    def close(self) -> None:
        self.lines.close()
        self.server.close()


def test_every_beat_is_answered_with_the_grant_as_long_as_it_is_said_again(tmp_path: Path) -> None:
    side = Server(tmp_path)
    try:
        side.lines.grant(Grant(1, 7, 1.5, 30.0), for_s=0.4)
        eventually(lambda: len(side.grants) >= 4)
        assert {(one.epoch, one.attempt, one.lease_s) for one in side.grants} == {(1, 7, 30.0)}
        heard = [one.heard for one in side.grants]
        assert heard == sorted(heard) and heard[-1] <= clock_s()
        ended = clock_s() + 0.4
        eventually(lambda: clock_s() > ended + 0.3)
        assert side.grants[-1].heard < ended
        side.lines.grant(Grant(1, 8, 1.5, 30.0), for_s=5.0)
        eventually(lambda: side.grants[-1].attempt == 8)
        assert not side.lost
    finally:
        side.close()


def test_a_new_attempt_is_granted_at_once_on_the_beat_heard_last(tmp_path: Path) -> None:
    side = Server(tmp_path)
    try:
        side.lines.grant(Grant(1, 1, 1.5, 30.0), for_s=5.0)
        eventually(lambda: side.grants)
        side.lines.grant(Grant(1, 2, 1.5, 30.0), for_s=5.0)
        eventually(lambda: side.grants[-1].attempt == 2)
        last = [one.heard for one in side.grants if one.attempt == 1][-1]
        first = next(one.heard for one in side.grants if one.attempt == 2)
        assert first == last
    finally:
        side.close()


def test_the_end_of_a_supervisor_is_told_and_being_let_go_is_told_before_it(tmp_path: Path) -> None:
    side = Server(tmp_path)
    try:
        side.lines.grant(Grant(3, 7, 1.5, 30.0), for_s=5.0)
        eventually(lambda: len(side.grants) >= 2)
        side.lines.forget("n0")
        eventually(lambda: side.ended)
        assert side.grants[-1].lease_s == 0.0
        assert all(one.lease_s for one in side.grants[:-1])
        side.lines.watch("n0", "127.0.0.1", side.server.port)
        eventually(lambda: side.grants[-1].lease_s)
        side.lines.close()
        eventually(lambda: len(side.ended) == 2)
        assert side.grants[-1].lease_s == 30.0
        assert side.ended == [3, 3]
    finally:
        side.close()


@pytest.fixture
def link() -> Link:
    return Link(None, FaultPoints(None))  # type: ignore[arg-type]


def holding(link: Link, attempt: int) -> threading.Thread:
    thread = threading.Thread(target=link.await_lease, args=(attempt,), daemon=True)
    thread.start()
    return thread


def tell(link: Link, attempt: int, until: float, number: int = 1) -> None:
    link._obey({"op": "lease", "attempt": attempt, "until": until, "number": number})


def test_a_late_word_of_the_same_attempt_takes_nothing_of_its_lease_back(link: Link) -> None:
    tell(link, 4, clock_s() + 30.0, number=2)
    tell(link, 4, 0.0, number=1)
    thread = holding(link, 4)
    thread.join(5.0)
    assert not thread.is_alive()


def test_a_lease_is_made_shorter_by_a_newer_word(link: Link) -> None:
    tell(link, 4, clock_s() + 30.0, number=1)
    tell(link, 4, 0.0, number=2)
    assert not link.has_lease(4)


def test_a_rank_holds_where_its_lease_has_ended_until_it_is_granted_again(link: Link) -> None:
    ended = clock_s() + 0.2
    tell(link, 4, ended, number=9)
    link.await_lease(4)  # returns at once
    eventually(lambda: clock_s() > ended)
    thread = holding(link, 4)
    tell(link, 3, clock_s() + 30.0, number=9)
    tell(link, 5, clock_s() + 30.0, number=9)
    thread.join(0.2)
    assert thread.is_alive(), "a lease of another attempt is none"


def test_a_fence_ends_the_hold(link: Link) -> None:
    thread = holding(link, 4)
    thread.join(0.1)
    assert thread.is_alive()
    link._obey({"op": "fence", "attempt": 5})
    thread.join(5.0)
    assert not thread.is_alive()


def test_a_grant_ends_the_hold(link: Link) -> None:
    thread = holding(link, 4)
    tell(link, 4, clock_s() + 30.0, number=9)
    thread.join(5.0)
    assert not thread.is_alive()


def test_a_lease_ends_while_its_machine_is_suspended(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell(link, 4, clock_s() + 30.0, number=9)
    before = time.clock_gettime
    slept = {time.CLOCK_BOOTTIME: 60.0}
    monkeypatch.setattr(time, "clock_gettime", lambda clock: before(clock) + slept.get(clock, 0.0))
    thread = holding(link, 4)
    thread.join(0.1)
    assert thread.is_alive()
    link._obey({"op": "fence", "attempt": 5})
    thread.join(5.0)


def gated(link: Link, beacon: Beacon, tmp_path: Path) -> Attempt:
    """Rank 0 of attempt 4, where it is about to apply a step."""
    paths = {"segment_path": tmp_path / "s", "segment_root": tmp_path}
    order = {"attempt": 4, "rank": 0, "mesh": {"dp_shard": 1}, "leased": True, **paths}
    order |= {"intervals": (1, 0)}
    config = {"replication_patience_s": 1.0, "replication_share": 0.1}
    recipe = SimpleNamespace(spec=SimpleNamespace(train=SimpleNamespace(steps=9)), layout=None)
    return Attempt(order, config, recipe, link, FaultPoints(None), beacon, None)  # type: ignore[arg-type]


def test_a_rank_that_holds_is_in_a_phase_without_limit_and_nothing_is_learned_of_it(
    link: Link, tmp_path: Path
) -> None:
    path = beacons.path_of(tmp_path, "n0.abc.1")
    beacons.create(path)
    beacon, reader = Beacon(path), BeaconReader(path)
    beacon.begin(4)
    attempt = gated(link, beacon, tmp_path)
    began = time.monotonic()
    beacon.enter("agree", 7)
    thread = threading.Thread(target=attempt.commit_gate, args=(7,), daemon=True)
    thread.start()

    def holds() -> bool:
        said = reader.read()
        return said is not None and said.phase == "hold"

    eventually(holds)
    agreed_s = time.monotonic() - began
    said = reader.read()
    assert said is not None
    assert (said.attempt, said.step) == (4, 7)
    assert Limits(DetectionSpec()).limit_s("hold", cold=False, bound_s=said.bound_s) == inf
    thread.join(0.3)
    tell(link, 4, clock_s() + 30.0, number=9)
    thread.join(5.0)
    said = reader.read()
    assert said is not None and said.phase == "agree"
    beacon.enter("optimizer", 7)
    stood = {one.phase: one.stood_s for one in reversed(reader.past())}
    assert stood["agree"] <= agreed_s, "the hold is no standstill of the agreement"
    assert stood["hold"] >= 0.3
    phases = reader.read()
    attempt.commit_gate(8)
    assert reader.read() == phases, "with a lease, the gate is no phase"
