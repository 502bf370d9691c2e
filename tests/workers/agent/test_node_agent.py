"""A real node agent with real workers: fences, forks, leftovers, and what it opens to the world."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
from tests.support.memory.shm import layout_of, write
from tests.support.nodes.local_agents import LocalAgents
from tests.support.nodes.supervised import small_training
from tests.support.waiting import eventually

from holdfast_workers.agent.node_agent import ZYGOTE_LIVES
from holdfast_workers.errors import StaleCommand
from holdfast_workers.ipc import linux_processes
from holdfast_workers.memory.data_server import DataServer
from holdfast_workers.memory.segment_store import NothingHeld, SegmentStore
from holdfast_workers.protocol.messages import (
    AgentReport,
    FormOrder,
    Origin,
    Partner,
    Place,
    Restore,
    Seat,
    Signal,
    SignalKind,
    Tier,
    WorkerState,
)
from holdfast_workers.spec import CheckpointSpec, MemoryTierSpec, ParallelSpec, RemoteTierSpec

pytestmark = pytest.mark.chaos
WAIT_S = 30.0


class OneAgent:
    """An agent of two workers in a world of one rank, commanded directly."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        training = small_training(
            100_000, blocks=2, micro_batches=4, parallel=ParallelSpec(), **changes
        )
        self.signals: list[Signal] = []
        self.agents = LocalAgents(
            1, training.model_dump(mode="json"), training.parallel.mesh, 2, folder / "checkpoints"
        )
        self.agents.on_signal = self.signals.append
        self.root = self.agents.root / "n0"
        self.agents.ensure()
        self.wait(lambda: self.report().ready)

    def call(self, method: str, *arguments: Any) -> Any:
        return self.agents.call("n0", method, *arguments, timeout_s=WAIT_S).result()

    def report(self) -> AgentReport:
        report: AgentReport = self.call("report")
        return report

    def form(
        self, attempt: int, worker: str | None = None, partners: tuple[Partner, ...] = ()
    ) -> int:
        """Form a world of one from step 0; the pid that trains in it."""
        port = self.report().store_port
        seat = Seat(0, worker, Restore(Tier.INIT, 0), partners)
        mesh = {"dp_shard": 1, "tp": 1}
        self.call("form", 1, FormOrder(attempt, mesh, 1, "127.0.0.1", port, (seat,)))
        self.wait(lambda: self.trains(attempt))
        return next(one.pid for one in self.report().workers if one.rank == 0)

    def trains(self, attempt: int) -> bool:
        return any(
            one.state is WorkerState.TRAINING and one.attempt == attempt and one.step > 1
            for one in self.report().workers
        )

    def step(self) -> int:
        return max(worker.step for worker in self.report().workers)

    def wait(self, condition: Callable[[], bool]) -> None:
        eventually(condition, WAIT_S, self.signals)


@pytest.fixture
def one(tmp_path: Path) -> Iterator[OneAgent]:
    made = OneAgent(tmp_path)
    yield made
    made.agents.close()


def test_a_node_is_checked_before_it_is_ready_and_whenever_it_is_asked_for(one: OneAgent) -> None:
    first = one.report()
    assert first.ready and first.measured["cpu"] > 0 and first.health >= 1
    assert not [found for found in first.findings if found["level"] == "unfit"]
    again: AgentReport = one.call("check", 1)
    assert again.health > first.health and again.measured["cpu"] > 0
    port = one.report().data_port
    assert one.call("exchange", 1, "127.0.0.1", port, 5.0) == ""
    one.call("fence", 2, 1)
    with pytest.raises(StaleCommand):
        one.call("check", 1)


def test_a_late_repetition_of_the_fence_leaves_the_formed_world_alone(one: OneAgent) -> None:
    one.call("fence", 1, 1)
    pid = one.form(1)
    step = one.step()
    one.call("fence", 1, 1)
    one.wait(lambda: one.step() > step)
    assert [worker.pid for worker in one.report().workers if worker.rank is not None] == [pid]


def test_nobody_trains_in_an_older_attempt_once_the_fence_has_answered(one: OneAgent) -> None:
    one.call("fence", 1, 1)
    pid = one.form(1)
    report: AgentReport = one.call("fence", 1, 2)
    (worker,) = [each for each in report.workers if each.pid == pid]
    assert worker.state is WorkerState.PARKED
    newest = max(held.step for held in report.held)
    with pytest.raises(StaleCommand):
        one.form(1, worker.worker)
    assert one.form(2, worker.worker) == pid  # the process lives on
    assert newest == max(held.step for held in report.held)


def test_a_stopped_worker_does_not_hold_up_the_fence(one: OneAgent) -> None:
    one.call("fence", 1, 1)
    pid = one.form(1)
    os.kill(pid, signal.SIGSTOP)
    report: AgentReport = one.call("fence", 1, 2)
    assert pid not in {each.pid for each in report.workers}
    assert not linux_processes.is_alive(pid)
    assert SignalKind.WORKER_EXITED in {each.kind for each in one.signals}


def test_many_orders_to_warm_up_fork_no_more_than_the_node_can_run(one: OneAgent) -> None:
    one.call("fence", 1, 1)
    for worker in one.report().workers:
        os.kill(worker.pid, signal.SIGKILL)
    one.wait(lambda: not one.report().workers)  # who is dying still counts
    calls = [one.agents.call("n0", "warm_up", 1, 1, timeout_s=WAIT_S) for _ in range(8)]
    wait(calls, WAIT_S)
    one.wait(lambda: len(one.report().workers) == 2)
    assert {each.state for each in one.report().workers} == {WorkerState.WARM}


def test_checkpoints_made_rarely_go_to_a_new_partner_too(tmp_path: Path, shm: Path) -> None:
    """The partner is lost between two of them: the newest is not of the present step."""
    every = 20
    checkpoint = CheckpointSpec(
        memory=MemoryTierSpec(every_steps=every), remote=RemoteTierSpec(every_steps=0)
    )
    one = OneAgent(tmp_path, checkpoint=checkpoint)
    replicas: list[int] = []
    servers = [
        DataServer(
            SegmentStore(shm / name, "dp_shard=1,tp=1"),
            one.agents.secret,
            "127.0.0.1",
            on_replica=lambda _rank, _attempt, step, of=of: of.append(step),
        )
        for name, of in (("first", []), ("second", replicas))
    ]
    try:
        first, second = (Partner("p", "127.0.0.1", server.port) for server in servers)
        one.call("fence", 1, 1)
        one.form(1, partners=(first,))
        one.wait(lambda: one.step() > every)
        servers[0].close()
        one.wait(lambda: SignalKind.PARTNER_LOST in {each.kind for each in one.signals})
        one.wait(lambda: 3 < one.step() % every < every // 2)
        one.call("set_partners", 1, 1, 0, (second,))
        one.wait(lambda: len(set(replicas)) >= 3)
    finally:
        one.agents.close()
        for server in servers:
            server.close()


def test_shared_memory_too_full_for_a_remote_save_costs_that_save_alone(tmp_path: Path) -> None:
    checkpoint = CheckpointSpec(
        memory=MemoryTierSpec(every_steps=1), remote=RemoteTierSpec(every_steps=10)
    )
    one = OneAgent(tmp_path, checkpoint=checkpoint)
    try:
        one.call("fence", 1, 1)
        pid = one.form(1)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, 4096))  # no new file fits
        kinds = {SignalKind.SHARD_FAILED, SignalKind.WORKER_FAILED, SignalKind.WORKER_EXITED}
        one.wait(lambda: any(each.kind in kinds for each in one.signals))
        told = next(each for each in one.signals if each.kind in kinds)
        assert told.kind is SignalKind.SHARD_FAILED
        assert "bytes are free" in told.detail["message"]
        one.wait(lambda: one.step() > told.detail["step"] + 20)
        assert [each.pid for each in one.report().workers if each.rank == 0] == [pid]
    finally:
        one.agents.close()


def test_a_copy_that_its_worker_never_handed_over_is_removed_at_the_fence(one: OneAgent) -> None:
    """So is a segment whose maker died before it had its name; the present attempt's stay."""
    left, half, present = (
        one.root / "save-0-5-1.seg",
        one.root / ".save-0-6-1.seg.4194999.new",
        one.root / "save-0-5-2.seg",
    )
    for path in (left, half, present):
        path.write_bytes(b"x")
    one.call("fence", 1, 2)
    assert (left.exists(), half.exists(), present.exists()) == (False, False, True)


def test_a_held_state_is_saved_to_the_remote_tier_on_command(one: OneAgent) -> None:
    """Once, however often it is told; a fence that comes meanwhile leaves it alone."""
    one.call("fence", 1, 1)
    one.form(1)
    report: AgentReport = one.call("fence", 1, 2)
    held = max(report.held, key=lambda each: each.step)
    order = (1, 0, held.place, held.attempt, held.step)
    for _ in range(2):
        one.call("save_held", *order)
    one.call("fence", 1, 3)
    one.wait(lambda: bool(one.report().shards) and not one.report().saving)
    one.call("save_held", *order)
    report = one.report()
    saved = [(shard["rank"], shard["attempt"], shard["step"]) for shard in report.shards]
    assert (saved, report.saving) == ([(0, held.attempt, held.step)], ())
    assert not list(one.root.glob("save-*.seg"))
    with pytest.raises(NothingHeld):
        one.call("save_held", 1, 0, held.place, held.attempt, held.step + 1)


def test_a_standby_frees_all_but_what_is_still_needed_of_the_mesh_that_trains(
    one: OneAgent,
) -> None:
    """It was never told to form: it knows of the job's first mesh alone."""
    store = SegmentStore(one.root, "dp_shard=1,tp=1")
    for kept in (store, store.of("dp_shard=2,tp=1")):
        for rank in range(2):
            write(kept.ensure(rank, Place.REPLICA, layout_of(1 << 14)), 1, 5)
    mesh = {"dp_shard": 2, "tp": 1}
    one.call("free_memory", 1, 1, mesh, frozenset[int](), frozenset({1}))
    held = [(mesh, held.rank) for mesh in store.meshes() for held in store.of(mesh).held()]
    assert held == [("dp_shard=2,tp=1", 1)]


def test_which_parts_of_a_state_could_not_be_had_is_told_before_the_rank_fails(
    one: OneAgent,
) -> None:
    gone = Origin(0, "gone", Place.REPLICA, "127.0.0.1", 1, "d")
    restore = Restore(Tier.RESHARD, 5, attempt=1, mesh="dp_shard=2,tp=1", origins=(gone,))
    mesh, port = {"dp_shard": 1, "tp": 1}, one.report().store_port
    seats = (Seat(0, None, restore),)
    one.call("form", 1, FormOrder(2, mesh, 1, "127.0.0.1", port, seats))
    one.wait(lambda: any(told.kind is SignalKind.WORKER_FAILED for told in one.signals))
    kinds = [told.kind for told in one.signals]
    at = kinds.index(SignalKind.SOURCES_LOST)
    assert at < kinds.index(SignalKind.WORKER_FAILED)
    assert one.signals[at].rank == 0
    assert one.signals[at].detail["origins"] == [["gone", "replica", 0]]


def test_every_port_of_an_agent_is_open_on_its_own_address_alone(one: OneAgent) -> None:
    report = one.report()
    assert listening(report.store_port) == {"127.0.0.1"}
    assert listening(report.data_port) == {"127.0.0.1"}


def test_a_store_that_dies_is_replaced_before_the_next_fence_answers(one: OneAgent) -> None:
    before = one.report().store_port
    agent = one.agents.agents["n0"].process
    assert agent is not None
    os.kill(named(agent.pid, "hf-store"), signal.SIGKILL)
    one.wait(lambda: one.report().store_port != before)
    report: AgentReport = one.call("fence", 1, 1)
    with socket.create_connection(("127.0.0.1", report.store_port), WAIT_S):
        pass


def test_a_zygote_that_ends_after_every_start_makes_the_node_unfit_and_is_not_started_for_ever(
    one: OneAgent,
) -> None:
    agent = one.agents.agents["n0"].process
    assert agent is not None
    for lost in range(1, ZYGOTE_LIVES + 1):
        os.kill(named(agent.pid, "hf-zygote"), signal.SIGKILL)
        one.wait(lambda n=lost: len(unfit(one)) == n)
        if lost < ZYGOTE_LIVES:  # a fork waits until the next one is ready
            os.kill(one.report().workers[0].pid, signal.SIGKILL)
            one.wait(lambda: len(one.report().workers) == 1)
            one.call("warm_up", 1, 1)
    failure = one.report().failure
    assert failure is not None
    assert f"ended {ZYGOTE_LIVES} times in a row" in failure["message"]
    assert unfit(one) == ["", "", failure["message"]]


def test_the_last_event_is_kept_with_the_order_to_stop(one: OneAgent) -> None:
    one.call("stop_workers", 1, [{"seq": 7, "kind": "ended"}])
    assert [event["seq"] for event in one.call("kept_events")] == [7]


def test_release_leaves_no_process_and_no_file(one: OneAgent) -> None:
    one.call("fence", 1, 1)
    pid = one.form(1)
    one.call("release")
    assert not one.root.exists()
    assert not linux_processes.is_alive(pid)


def listening(port: int) -> set[str]:
    """Addresses on which this machine listens on `port`."""
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            local, state = line.split()[1], line.split()[3]
            address, _, number = local.partition(":")
            if state == "0A" and int(number, 16) == port:
                raw = bytes.fromhex(address)
                words = [raw[at : at + 4][::-1] for at in range(0, len(raw), 4)]
                found.add(socket.inet_ntop(family, b"".join(words)))
    return found


def unfit(one: OneAgent) -> list[str]:
    """What its signals of lost zygotes said of the node, in order."""
    return [s.detail["unfit"] for s in tuple(one.signals) if s.kind is SignalKind.ZYGOTE_LOST]


def named(parent: int, name: str) -> int:
    """The one child of `parent` that bears this name; a process just forked bears its maker's."""
    deadline = time.monotonic() + WAIT_S
    while len(found := all_named(parent, name)) != 1:
        assert time.monotonic() < deadline, found
        time.sleep(0.01)
    return found[0]


def all_named(parent: int, name: str) -> list[int]:
    found = []
    for thread in Path(f"/proc/{parent}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            children = (thread / "children").read_text().split()
            found += [int(child) for child in children if bears(int(child), name)]
    return found


def bears(pid: int, name: str) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/comm").read_text().strip() == name and linux_processes.is_alive(
            pid
        )
    return False
