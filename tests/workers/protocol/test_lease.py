from __future__ import annotations

import random
import subprocess
import threading
import time
from math import inf
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.support.faults.faulty_link import FaultyLink
from tests.support.memory.shm import MESH, SECRET
from tests.support.nodes.agent_config import agent_config, join_order
from tests.support.waiting import DEADLINE_S, eventually

from holdfast_workers.agent.supervisor_end import SupervisorEnd
from holdfast_workers.fault_injection.fault_points import FaultPoints
from holdfast_workers.ipc.linux_processes import identify
from holdfast_workers.memory.data_server import DataServer
from holdfast_workers.memory.lifeline import Lifelines
from holdfast_workers.memory.segment_store import SegmentStore
from holdfast_workers.progress import beacon as beacons
from holdfast_workers.progress.beacon import Beacon, BeaconReader
from holdfast_workers.progress.hang_limits import HangLimits
from holdfast_workers.protocol.lease import Grant, Lease, clock_s, encode_beat
from holdfast_workers.protocol.processes import LeaseUpdate, LeaveAttempts
from holdfast_workers.spec import DetectionSpec
from holdfast_workers.worker.attempt import RankAttempt
from holdfast_workers.worker.main import WorkerLink


class NotificationRecorder:
    def __init__(self) -> None:
        self.leases: list[tuple[int, float]] = []
        self.numbers: list[int] = []

    def __call__(self, attempt: int, until: float, number: int) -> None:
        self.leases.append((attempt, until))
        self.numbers.append(number)


def until(lease: Lease, attempt: int) -> float:
    return lease.until(attempt)[0]


def test_a_lease_runs_from_the_answered_beat_and_not_from_the_answer() -> None:
    lease = Lease(NotificationRecorder())
    answer = Grant(epoch=3, attempt=2, silence_s=1.5, lease_s=30.0).answer_to(encode_beat(100.0))
    lease.renew(Grant.unpack(answer))
    assert until(lease, 2) == 101.5
    assert until(lease, 1) == 0.0


def test_grants_out_of_order_neither_shorten_nor_extend_a_lease() -> None:
    lease = Lease(NotificationRecorder())
    for attempt, beat_at, ends in [(2, 100.0, 110.0), (2, 90.0, 110.0), (1, 500.0, 110.0)]:
        lease.renew(Grant(1, attempt, 10.0, 30.0, beat_at))
        assert until(lease, 2) == ends
    lease.renew(Grant(1, 3, 10.0, 30.0, 95.0))
    assert (until(lease, 2), until(lease, 3)) == (0.0, 105.0)


def test_a_successor_grants_the_attempt_that_it_adopts_after_a_later_one_was_announced() -> None:
    """The supervisor of epoch 1 announced attempt 3 and died before any agent was fenced for it;
    its successor adopts attempt 2."""
    notified = NotificationRecorder()
    lease = Lease(notified)
    for epoch, attempt, beat_at in [(1, 2, 100.0), (1, 3, 101.0), (2, 2, 102.0)]:
        lease.renew(Grant(epoch, attempt, 1.5, 10.0, beat_at))
    assert until(lease, 2) == 103.5
    assert notified.leases[-1] == (2, 103.5)
    lease.renew(Grant(1, 3, 1.5, 10.0, 200.0))
    assert until(lease, 2) == 103.5


def test_only_the_end_of_the_granting_supervisor_extends_a_lease() -> None:
    notified = NotificationRecorder()
    lease = Lease(notified)
    lease.renew(Grant(2, 1, 1.5, 10.0, 100.0))
    lease.supervisor_ended(1, 101.0)
    assert until(lease, 1) == 101.5
    lease.supervisor_ended(2, 101.0)
    assert until(lease, 1) == 110.0
    assert notified.leases[-1] == (1, 110.0)


def test_the_end_of_the_supervisor_after_the_lease_extends_nothing() -> None:
    lease = Lease(NotificationRecorder())
    lease.renew(Grant(2, 1, 1.5, 10.0, 100.0))
    lease.supervisor_ended(2, 101.6)
    assert until(lease, 1) == 101.5


def test_a_successor_ends_the_extension_from_its_predecessors_end() -> None:
    notified = NotificationRecorder()
    lease = Lease(notified)
    lease.renew(Grant(2, 1, 1.5, 10.0, 100.0))
    lease.supervisor_ended(2, 101.0)
    lease.supervisor_replaced(3, 104.0)
    assert until(lease, 1) == 105.5
    assert notified.leases[-1] == (1, 105.5)
    lease.renew(Grant(2, 1, 1.5, 10.0, 104.2))  # sent before the takeover
    lease.supervisor_ended(2, 104.5)
    assert until(lease, 1) == 105.5
    assert notified.numbers == sorted(set(notified.numbers))


def test_workers_are_notified_well_before_their_lease_ends_but_not_at_every_beat() -> None:
    notified = NotificationRecorder()
    lease = Lease(notified)
    for number in range(401):
        lease.renew(Grant(1, 1, 8.0, 30.0, number * 0.25))
        assert notified.leases[-1][1] > number * 0.25 + 6.5
    assert len(notified.leases) == 101
    lease.renew(Grant(1, 2, 8.0, 30.0, 100.1))
    assert notified.leases[-1] == (2, 108.1)


class Server:
    """A data server that records its grants, and a lifeline to it."""

    def __init__(self, root: Path) -> None:
        self.grants: list[Grant] = []
        self.ended: list[int] = []
        self.lost: list[str] = []
        self.server = DataServer(
            SegmentStore(root, MESH),
            SECRET,
            "127.0.0.1",
            on_grant=self.grants.append,
            on_lifeline_end=self.ended.append,
            heartbeat_s=0.05,
        )
        self.lines = Lifelines(SECRET, lambda agent, reason: self.lost.append(reason), 3600.0)
        self.lines.watch("n0", "127.0.0.1", self.server.port)

    def close(self) -> None:
        self.lines.close()
        self.server.close()


def test_every_beat_is_answered_while_the_grant_is_renewed(tmp_path: Path) -> None:
    side = Server(tmp_path)
    try:
        side.lines.grant(Grant(1, 7, 1.5, 30.0), for_s=3600.0)
        eventually(lambda: len(side.grants) >= 4)
        assert {(grant.epoch, grant.attempt, grant.lease_s) for grant in side.grants} == {
            (1, 7, 30.0)
        }
        beat_at = [grant.beat_at for grant in side.grants]
        assert beat_at == sorted(beat_at) and beat_at[-1] <= clock_s()
        side.lines.grant(Grant(1, 7, 1.5, 30.0), for_s=0.4)
        ended = clock_s() + 0.4
        eventually(lambda: clock_s() > ended + 0.3)
        assert side.grants[-1].beat_at < ended
        side.lines.grant(Grant(1, 8, 1.5, 30.0), for_s=5.0)
        eventually(lambda: side.grants[-1].attempt == 8)
        assert not side.lost
    finally:
        side.close()


def test_a_new_attempt_is_granted_at_once_on_the_newest_beat(tmp_path: Path) -> None:
    side = Server(tmp_path)
    try:
        side.lines.grant(Grant(1, 1, 1.5, 30.0), for_s=5.0)
        eventually(lambda: side.grants)
        side.lines.grant(Grant(1, 2, 1.5, 30.0), for_s=5.0)
        eventually(lambda: side.grants[-1].attempt == 2)
        last = [grant.beat_at for grant in side.grants if grant.attempt == 1][-1]
        first = next(grant.beat_at for grant in side.grants if grant.attempt == 2)
        assert first == last
    finally:
        side.close()


class Extending:
    """A lease that grants renew behind a proxy that resets, and a process that stands for the
    supervisor's."""

    def __init__(self, root: Path, seed: int) -> None:
        self.process = subprocess.Popen(["sleep", "infinity"])
        self.lease = Lease(lambda attempt, until, number: None)
        end = SupervisorEnd(self.lease, lambda _: False, threading.Event())
        end.introduce(1, identify(self.process.pid))
        self.asked = 0

        def ask(epoch: int) -> None:
            self.asked += 1
            end.lifeline_ended(epoch)

        self.server = DataServer(
            SegmentStore(root, MESH),
            SECRET,
            "127.0.0.1",
            on_grant=self.lease.renew,
            on_lifeline_end=ask,
            heartbeat_s=0.01,
        )
        self.proxy = FaultyLink(self.server.port)
        self.lost: list[str] = []
        self.lines = Lifelines(SECRET, lambda agent, reason: self.lost.append(reason), 5.0)
        self.lines.grant(Grant(1, 7, SILENCE_S, 30.0), for_s=60.0)
        self.lines.watch("n0", "127.0.0.1", self.proxy.port)
        eventually(lambda: until(self.lease, 7) > 0)

    def end_supervisor(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.end_supervisor()
        self.lines.close()
        self.proxy.close()
        self.server.close()


SILENCE_S = 3.0


@pytest.mark.seconds
def test_resets_at_any_moment_neither_extend_a_lease_nor_lose_an_agent(tmp_path: Path) -> None:
    seed = 4
    rng = random.Random(seed)
    side = Extending(tmp_path, seed)
    try:
        ends = clock_s() + 4.0
        while clock_s() < ends or side.proxy.resets <= 50 or not side.asked:
            side.proxy.reset()
            time.sleep(rng.uniform(0.0, 0.02))  # the moments to test, no wait for anything
            assert until(side.lease, 7) <= clock_s() + SILENCE_S, f"seed {seed}"
        before = until(side.lease, 7)
        eventually(lambda: until(side.lease, 7) > before)
        assert not side.lost
    finally:
        side.close()


def test_the_end_of_the_supervisors_process_extends_the_lease(tmp_path: Path) -> None:
    side = Extending(tmp_path, 0)
    try:
        side.proxy.refuses = True
        side.proxy.reset()
        eventually(lambda: side.asked)
        side.end_supervisor()
        eventually(lambda: until(side.lease, 7) > clock_s() + 2 * SILENCE_S)
    finally:
        side.close()


@pytest.fixture
def link() -> WorkerLink:
    return WorkerLink(None, FaultPoints(None))  # type: ignore[arg-type]


def holding(link: WorkerLink, attempt: int) -> threading.Thread:
    thread = threading.Thread(target=link.await_lease, args=(attempt,), daemon=True)
    thread.start()
    return thread


def notify(link: WorkerLink, attempt: int, until: float, number: int = 1) -> None:
    link._handle(LeaseUpdate(attempt, until, number))


def test_a_late_notification_of_the_same_attempt_does_not_shorten_its_lease(
    link: WorkerLink,
) -> None:
    notify(link, 4, clock_s() + 3600.0, number=2)
    notify(link, 4, 0.0, number=1)
    thread = holding(link, 4)
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def test_a_newer_notification_can_shorten_a_lease(link: WorkerLink) -> None:
    notify(link, 4, clock_s() + 30.0, number=1)
    notify(link, 4, 0.0, number=2)
    assert not link.has_lease(4)


def test_a_rank_without_a_lease_holds_until_it_is_granted_again(link: WorkerLink) -> None:
    notify(link, 4, clock_s() + 3600.0, number=9)
    link.await_lease(4)  # returns at once
    notify(link, 4, clock_s(), number=10)
    thread = holding(link, 4)
    notify(link, 3, clock_s() + 3600.0, number=11)
    notify(link, 5, clock_s() + 3600.0, number=11)
    thread.join(0.2)
    assert thread.is_alive(), "a lease of another attempt does not count"


def test_a_fence_ends_the_hold(link: WorkerLink) -> None:
    thread = holding(link, 4)
    thread.join(0.1)
    assert thread.is_alive()
    link._handle(LeaveAttempts(5))
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def test_a_grant_ends_the_hold(link: WorkerLink) -> None:
    thread = holding(link, 4)
    notify(link, 4, clock_s() + 3600.0, number=9)
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def test_a_lease_ends_while_its_machine_is_suspended(
    link: WorkerLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    notify(link, 4, clock_s() + 30.0, number=9)
    before = time.clock_gettime
    slept = {time.CLOCK_BOOTTIME: 60.0}
    monkeypatch.setattr(time, "clock_gettime", lambda clock: before(clock) + slept.get(clock, 0.0))
    thread = holding(link, 4)
    thread.join(0.1)
    assert thread.is_alive()
    link._handle(LeaveAttempts(5))
    thread.join(DEADLINE_S)


def gated(link: WorkerLink, beacon: Beacon, tmp_path: Path) -> RankAttempt:
    """Rank 0 of attempt 4, about to apply a step."""
    order = join_order(tmp_path / "s", attempt=4, leased=True, intervals=(1, 0))
    config = agent_config(tmp_path).zygote_config
    recipe = SimpleNamespace(spec=SimpleNamespace(train=SimpleNamespace(last_step=9)), layout=None)
    return RankAttempt(order, config, recipe, link, FaultPoints(None), beacon, None)  # type: ignore[arg-type]


def test_a_holding_rank_is_in_a_phase_without_a_limit_that_is_not_learned(
    link: WorkerLink, tmp_path: Path
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

    def is_holding() -> bool:
        reading = reader.read()
        return reading is not None and reading.phase == "hold"

    eventually(is_holding)
    agreed_s = time.monotonic() - began
    reading = reader.read()
    assert reading is not None
    assert (reading.attempt, reading.step) == (4, 7)
    assert HangLimits(DetectionSpec()).limit_s("hold", cold=False, bound_s=reading.bound_s) == inf
    thread.join(0.3)
    notify(link, 4, clock_s() + 3600.0, number=9)
    thread.join(DEADLINE_S)
    reading = reader.read()
    assert reading is not None and reading.phase == "agree"
    beacon.enter("optimizer", 7)
    stood = {grant.phase: grant.standstill_s for grant in reversed(reader.ended_phases())}
    assert stood["agree"] <= agreed_s, "the hold does not count as a standstill of the agreement"
    assert stood["hold"] >= 0.3
    phases = reader.read()
    attempt.commit_gate(8)
    assert reader.read() == phases, "with a lease, the gate adds no phase"
