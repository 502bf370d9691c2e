"""A real node agent with real workers: fences, forks, leftover files, and open ports."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
from tests.support.memory.shm import layout_of, write
from tests.support.nodes.local_agents import LocalAgents
from tests.support.nodes.supervised import small_agents, small_training
from tests.support.waiting import eventually

from holdfast_workers.agent.child_events import ZYGOTE_LIVES
from holdfast_workers.ipc import linux_processes
from holdfast_workers.memory.data_server import DataServer
from holdfast_workers.memory.segment_store import SegmentStore
from holdfast_workers.protocol.answers import (
    AgentReport,
    Done,
    ExchangeResult,
    KeptEvents,
    RequestRefused,
)
from holdfast_workers.protocol.commands import (
    CheckNode,
    Command,
    ExchangeBytes,
    Fence,
    Form,
    FreeMemory,
    ListEvents,
    Query,
    Request,
    SaveShard,
    SetIntervals,
    SetPartners,
    Stop,
    WarmUp,
)
from holdfast_workers.protocol.findings import messages_of
from holdfast_workers.protocol.messages import (
    FormOrder,
    Origin,
    Partner,
    Place,
    Restore,
    Seat,
    SupervisorEvent,
    Tier,
    WorkerState,
)
from holdfast_workers.protocol.signals import (
    ShardFailed,
    Signal,
    SignalKind,
    SourcesLost,
    StoreLost,
    WorkerExited,
    ZygoteLost,
)
from holdfast_workers.spec import (
    CheckpointSpec,
    MemoryTierSpec,
    ParallelSpec,
    RemoteTierSpec,
    TrainingSpec,
)

pytestmark = pytest.mark.chaos
WAIT_S = 60.0
Expected = TypeVar("Expected")


class SingleAgent:
    """An agent of two workers in a world of one rank, commanded directly by the test."""

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

    @property
    def pid(self) -> int:
        process = self.agents.agents["n0"].process
        assert process is not None
        return process.pid

    def send(self, command: Command, epoch: int = 1) -> None:
        """Send a command without an answer of its own."""
        self.ask(command, Done, epoch)

    def ask(self, command: Command | Query, answer: type[Expected], epoch: int = 1) -> Expected:
        request = Request(command, epoch)
        return self.agents.call("n0", request, answer, timeout_s=WAIT_S).result()

    def fence(self, attempt: int) -> AgentReport:
        return self.ask(Fence("n0", attempt), AgentReport)

    def report(self) -> AgentReport:
        return self.agents.report("n0")

    def form(
        self, attempt: int, worker: str | None = None, partners: tuple[Partner, ...] = ()
    ) -> int:
        """Form a world of one rank from step 0; returns the pid of its worker."""
        port = self.report().store_port
        seat = Seat(0, worker, Restore(Tier.INIT, 0), partners)
        mesh = {"dp_shard": 1, "tp": 1}
        self.send(Form("n0", FormOrder(attempt, mesh, 1, "127.0.0.1", port, (seat,))))
        self.wait(lambda: self.trains(attempt))
        return next(worker.pid for worker in self.report().workers if worker.rank == 0)

    def trains(self, attempt: int) -> bool:
        return any(
            worker.state is WorkerState.TRAINING and worker.attempt == attempt and worker.step > 1
            for worker in self.report().workers
        )

    def close(self) -> None:
        self.agents.close()

    def step(self) -> int:
        return max(worker.step for worker in self.report().workers)

    def wait(self, condition: Callable[[], bool]) -> None:
        eventually(condition, WAIT_S, self.signals)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[SingleAgent]:
    with contextlib.closing(SingleAgent(tmp_path)) as made:
        yield made


def test_a_node_is_checked_before_it_is_ready_and_on_each_request(node: SingleAgent) -> None:
    first = node.report()
    health = first.health
    assert first.ready and health.measured["cpu"] > 0 and health.number >= 1
    assert not messages_of(health.findings)
    again = node.ask(CheckNode("n0"), AgentReport).health
    assert again.number > health.number and again.measured["cpu"] > 0
    exchange = ExchangeBytes("127.0.0.1", node.report().data_port, 5.0)
    assert node.ask(exchange, ExchangeResult) == ExchangeResult("")
    node.ask(Fence("n0", 1), AgentReport, epoch=2)
    with pytest.raises(RequestRefused, match="StaleCommand"):
        node.ask(CheckNode("n0"), AgentReport)


def test_a_late_repeated_fence_does_not_affect_the_formed_attempt(node: SingleAgent) -> None:
    node.fence(1)
    pid = node.form(1)
    step = node.step()
    node.fence(1)
    node.wait(lambda: node.step() > step)
    assert [worker.pid for worker in node.report().workers if worker.rank is not None] == [pid]


@pytest.mark.cell("P1", "agent")
def test_no_worker_trains_in_an_older_attempt_after_the_fence_returns(node: SingleAgent) -> None:
    node.fence(1)
    pid = node.form(1)
    report = node.fence(2)
    (worker,) = [each for each in report.workers if each.pid == pid]
    assert worker.state is WorkerState.PARKED
    newest = max(held.step for held in report.held)
    with pytest.raises(RequestRefused, match="StaleCommand"):
        node.form(1, worker.worker)
    assert newest == max(held.step for held in node.report().held)
    assert node.form(2, worker.worker) == pid  # the process lives on


def test_a_stopped_worker_does_not_delay_the_fence(node: SingleAgent) -> None:
    node.fence(1)
    pid = node.form(1)
    os.kill(pid, signal.SIGSTOP)
    report = node.fence(2)
    assert pid not in {each.pid for each in report.workers}
    assert not linux_processes.is_alive(pid)
    assert SignalKind.WORKER_EXITED in {each.kind for each in node.signals}


def test_no_command_waits_for_a_stopped_worker_whose_control_socket_is_full(
    node: SingleAgent,
) -> None:
    node.fence(1)
    pid = node.form(1)
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + WAIT_S
    while linux_processes.is_alive(pid):  # each command is a message that it does not read
        assert time.monotonic() < deadline
        node.send(SetIntervals("n0", 1, 1, 0))
    node.wait(lambda: SignalKind.WORKER_EXITED in {each.kind for each in node.signals})
    (exited,) = (s.detail for s in node.signals if isinstance(s.detail, WorkerExited))
    assert exited.why == "it did not read its control messages"
    node.fence(2)


def test_repeated_warm_up_commands_fork_no_more_workers_than_the_node_can_run(
    node: SingleAgent,
) -> None:
    node.fence(1)
    for worker in node.report().workers:
        os.kill(worker.pid, signal.SIGKILL)
    node.wait(lambda: not node.report().workers)  # a dying worker still counts
    request = Request(WarmUp("n0", 1), epoch=1)
    calls = [node.agents.call("n0", request, Done, timeout_s=WAIT_S) for _ in range(8)]
    wait(calls, WAIT_S)
    node.wait(lambda: len(node.report().workers) == 2)
    assert {each.state for each in node.report().workers} == {WorkerState.WARM}


def test_a_new_partner_gets_a_checkpoint_that_is_older_than_the_present_step(
    tmp_path: Path, shm: Path
) -> None:
    """The partner is lost between two checkpoints: the newest is not of the present step."""
    every = 20
    checkpoint = CheckpointSpec(
        memory=MemoryTierSpec(every_steps=every), remote=RemoteTierSpec(every_steps=0)
    )
    node = SingleAgent(tmp_path, checkpoint=checkpoint)
    replicas: list[int] = []

    def replica_server(name: str, steps: list[int]) -> DataServer:
        return DataServer(
            SegmentStore(shm / name, "dp_shard=1,tp=1"),
            node.agents.secret,
            "127.0.0.1",
            on_replica=lambda _rank, _attempt, step: steps.append(step),
        )

    servers = [replica_server("first", []), replica_server("second", replicas)]
    try:
        first, second = (Partner("p", "127.0.0.1", server.port) for server in servers)
        node.fence(1)
        node.form(1, partners=(first,))
        node.wait(lambda: node.step() > every)
        servers[0].close()
        node.wait(lambda: SignalKind.PARTNER_LOST in {each.kind for each in node.signals})
        node.wait(lambda: 3 < node.step() % every < every // 2)
        node.send(SetPartners("n0", 1, 0, (second,)))
        node.wait(lambda: len(set(replicas)) >= 3)
    finally:
        node.agents.close()
        for server in servers:
            server.close()


def test_full_shared_memory_fails_only_the_remote_save(tmp_path: Path) -> None:
    checkpoint = CheckpointSpec(
        memory=MemoryTierSpec(every_steps=1), remote=RemoteTierSpec(every_steps=10)
    )
    with contextlib.closing(SingleAgent(tmp_path, checkpoint=checkpoint)) as node:
        node.fence(1)
        pid = node.form(1)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, 4096))  # no new file fits
        kinds = {SignalKind.SHARD_FAILED, SignalKind.WORKER_FAILED, SignalKind.WORKER_EXITED}
        node.wait(lambda: any(each.kind in kinds for each in node.signals))
        reported = next(each.detail for each in node.signals if each.kind in kinds)
        assert isinstance(reported, ShardFailed)
        assert "bytes are free" in reported.message
        step = reported.step
        node.wait(lambda: node.step() > step + 20)
        assert [each.pid for each in node.report().workers if each.rank == 0] == [pid]


def test_a_copy_that_was_never_handed_over_is_removed_at_the_fence(node: SingleAgent) -> None:
    """A segment whose creator died before naming it is removed too; the present attempt's files
    stay."""
    leftover, unnamed, present = (
        node.root / "save-0-5-1.seg",
        node.root / ".save-0-6-1.seg.4194999.new",
        node.root / "save-0-5-2.seg",
    )
    for path in (leftover, unnamed, present):
        path.write_bytes(b"x")
    node.fence(2)
    assert (leftover.exists(), unnamed.exists(), present.exists()) == (False, False, True)


def test_a_held_checkpoint_is_saved_to_the_remote_tier_on_command(node: SingleAgent) -> None:
    """A repeated command saves it once; a fence does not affect the save."""
    node.fence(1)
    node.form(1)
    report = node.fence(2)
    held = max(report.held, key=lambda each: each.step)
    save = SaveShard("n0", 0, held.place, held.attempt, held.step)
    for _ in range(2):
        node.send(save)
    node.fence(3)
    node.wait(lambda: bool(node.report().shards) and not node.report().saving)
    node.send(save)
    report = node.report()
    saved = [(shard.rank, shard.attempt, shard.step) for shard in report.shards]
    assert (saved, report.saving) == ([(0, held.attempt, held.step)], ())
    assert not list(node.root.glob("save-*.seg"))
    with pytest.raises(RequestRefused, match="NothingHeld"):
        node.send(replace(save, step=held.step + 1))


def test_a_standby_frees_all_checkpoints_except_those_still_needed(
    node: SingleAgent,
) -> None:
    """It never got an order to form an attempt: it knows only the job's first mesh."""
    store = SegmentStore(node.root, "dp_shard=1,tp=1")
    for kept in (store, store.for_mesh("dp_shard=2,tp=1")):
        for rank in range(2):
            write(kept.ensure(rank, Place.REPLICA, layout_of(1 << 14)), 1, 5)
    mesh = {"dp_shard": 2, "tp": 1}
    node.send(FreeMemory("n0", 1, mesh, own=frozenset(), replicas=frozenset({1})))
    held = [(mesh, held.rank) for mesh in store.meshes() for held in store.for_mesh(mesh).held()]
    assert held == [("dp_shard=2,tp=1", 1)]


def test_lost_sources_are_reported_before_the_failure_of_the_rank(
    node: SingleAgent,
) -> None:
    gone = Origin(0, "gone", Place.REPLICA, "127.0.0.1", 1, "d")
    restore = Restore(Tier.RESHARD, 5, attempt=1, mesh="dp_shard=2,tp=1", origins=(gone,))
    mesh, port = {"dp_shard": 1, "tp": 1}, node.report().store_port
    seats = (Seat(0, None, restore),)
    node.send(Form("n0", FormOrder(2, mesh, 1, "127.0.0.1", port, seats)))
    node.wait(lambda: any(signal.kind is SignalKind.WORKER_FAILED for signal in node.signals))
    kinds = [signal.kind for signal in node.signals]
    index = kinds.index(SignalKind.SOURCES_LOST)
    assert index < kinds.index(SignalKind.WORKER_FAILED)
    assert node.signals[index].rank == 0
    lost = node.signals[index].detail
    assert isinstance(lost, SourcesLost) and lost.origins == (("gone", Place.REPLICA, 0),)


def test_every_port_of_an_agent_listens_on_its_own_address_only(node: SingleAgent) -> None:
    report = node.report()
    assert listening(report.store_port) == {"127.0.0.1"}
    assert listening(report.data_port) == {"127.0.0.1"}


def test_a_dead_store_is_replaced_before_the_next_fence_returns(node: SingleAgent) -> None:
    before = node.report().store_port
    os.kill(named(node, "hf-store"), signal.SIGKILL)
    node.wait(lambda: node.report().store_port != before)
    report = node.fence(1)
    with socket.create_connection(("127.0.0.1", report.store_port), WAIT_S):
        pass


def test_a_store_that_does_not_answer_is_replaced_and_never_reported_by_a_fence(
    node: SingleAgent,
) -> None:
    before = node.report().store_port
    store = named(node, "hf-store")
    os.kill(store, signal.SIGSTOP)
    assert node.fence(1).store_port != before
    node.wait(lambda: node.report().store_port not in (0, before))
    assert node.fence(1).store_port == node.report().store_port
    lost = [detail.port for s in node.signals if isinstance(detail := s.detail, StoreLost)]
    assert lost == [before]


def test_the_store_of_a_programs_attempt_stays_however_often_and_early_it_is_fenced(
    tmp_path: Path,
) -> None:
    training = TrainingSpec(command=("true",)).model_dump(mode="json")
    agents = LocalAgents(1, training, ParallelSpec().mesh, 1, tmp_path / "checkpoints")

    def fence() -> AgentReport:
        request = Request(Fence("n0", 3), 1)
        return agents.call("n0", request, AgentReport, timeout_s=WAIT_S).result()

    try:
        agents.ensure()
        assert not fence().ready, "it is fenced while it starts"
        eventually(lambda: agents.report("n0").ready, WAIT_S)
        ports = [agents.report("n0").store_port, fence().store_port, fence().store_port]
        assert ports[0] > 0 and len(set(ports)) == 1
    finally:
        agents.close()


@pytest.mark.cell("P5", "agent")
def test_a_node_whose_zygotes_end_repeatedly_becomes_unfit_and_starts_no_more(
    node: SingleAgent,
) -> None:
    for lost in range(1, ZYGOTE_LIVES + 1):
        os.kill(named(node, "hf-zygote"), signal.SIGKILL)

        def is_reported(count: int = lost) -> bool:
            return len(unfit(node)) == count

        node.wait(is_reported)
        if lost < ZYGOTE_LIVES:  # a fork waits until the next zygote is ready
            os.kill(node.report().workers[0].pid, signal.SIGKILL)
            node.wait(lambda: len(node.report().workers) == 1)
            node.send(WarmUp("n0", 1))
    failure = node.report().failure
    assert failure is not None
    assert f"ended {ZYGOTE_LIVES} times in a row" in failure.message
    assert unfit(node) == ["", "", failure.message]


def test_an_event_sent_with_the_stop_command_is_kept(node: SingleAgent) -> None:
    ended = SupervisorEvent(7, 1.5, "ended", {"outcome": "FAILED"})
    stop = Request(Stop("n0", "it is over"), epoch=1, events=(ended,))
    node.agents.call("n0", stop, Done, timeout_s=WAIT_S).result()
    assert node.ask(ListEvents(), KeptEvents).events == (ended,)


def test_the_helpers_of_a_dead_worker_leave_no_zombie(tmp_path: Path) -> None:
    function = "tests.support.ranks.functions:with_helpers"
    with contextlib.closing(SingleAgent(tmp_path, function=function)) as node:
        node.fence(1)
        worker = node.form(1)
        node.wait(lambda: len(children(worker)) >= 8)
        os.kill(worker, signal.SIGKILL)
        node.wait(lambda: SignalKind.WORKER_EXITED in [signal.kind for signal in node.signals])
        alive = linux_processes.is_alive
        node.wait(lambda: all(map(alive, children(node.pid))))
        assert node.report().failure is None


def test_an_agent_frees_the_memory_that_a_former_node_left(tmp_path: Path) -> None:
    with small_agents(tmp_path) as agents:
        left = agents.root / "ended-job" / "n0-former"
        taken = "from holdfast_workers.memory.node_folder import *; import os, sys; "
        taken += "NodeFolder(Path(sys.argv[1]), None, os.getpid()).take()"
        subprocess.run([sys.executable, "-c", taken, str(left)], check=True)
        agent = agents.agents["n0"]
        agent.config = replace(agent.config, memory_base=str(agents.root))
        agents.ensure()
        eventually(lambda: not left.parent.exists(), WAIT_S, "the memory stays")


def test_release_leaves_no_process_and_no_file(node: SingleAgent) -> None:
    node.fence(1)
    pid = node.form(1)
    node.agents.call_method("n0", "release", timeout_s=WAIT_S).result()
    assert not node.root.exists()
    assert not linux_processes.is_alive(pid)


def listening(port: int) -> set[str]:
    """Addresses on which this machine listens on `port`."""
    return {
        each.laddr.ip
        for each in psutil.net_connections("tcp")
        if each.laddr and each.laddr.port == port and each.status == psutil.CONN_LISTEN
    }


def unfit(node: SingleAgent) -> list[str]:
    """The `unfit` texts of the signals about lost zygotes, in order."""
    details = [signal.detail for signal in tuple(node.signals)]
    return [detail.unfit for detail in details if isinstance(detail, ZygoteLost)]


def named(agent: SingleAgent, name: str) -> int:
    """The only process with this name that the agent has forked. One that was just forked still has
    the name of its parent."""
    found: list[int] = []

    def is_there() -> bool:
        found[:] = [child for child in children(agent.pid) if has_name(child, name)]
        return len(found) == 1

    agent.wait(is_there)
    return found[0]


def children(parent: int) -> list[int]:
    return [child.pid for child in psutil.Process(parent).children()]


def has_name(pid: int, name: str) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
        return psutil.Process(pid).name() == name and linux_processes.is_alive(pid)
    return False
