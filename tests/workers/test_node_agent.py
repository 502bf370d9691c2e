"""A real node agent with real workers: fences, forks, leftovers, and what it opens to the world."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
from tests.support.local_agents import LocalAgents
from tests.support.supervised import small_training

from holdfast_workers import processes
from holdfast_workers.errors import StaleCommand
from holdfast_workers.messages import (
    AgentReport,
    FormOrder,
    Restore,
    Seat,
    Signal,
    SignalKind,
    Tier,
    WorkerState,
)
from holdfast_workers.spec import ParallelSpec

pytestmark = pytest.mark.chaos
WAIT_S = 30.0


class OneAgent:
    """An agent of two workers in a world of one rank, commanded directly."""

    def __init__(self, folder: Path) -> None:
        training = small_training(100_000, parallel=ParallelSpec())
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

    def form(self, attempt: int, worker: str | None = None) -> int:
        """Form a world of one from step 0; the pid that trains in it."""
        port = self.report().store_port
        seat = Seat(0, worker, Restore(Tier.INIT, 0), None)
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
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, self.signals
            time.sleep(0.01)


@pytest.fixture
def one(tmp_path: Path) -> Iterator[OneAgent]:
    made = OneAgent(tmp_path)
    yield made
    made.agents.close()


def test_a_late_repetition_of_the_fence_leaves_the_formed_world_alone(one: OneAgent) -> None:
    one.call("fence", 1, 1)
    pid = one.form(1)
    step = one.step()
    one.call("fence", 1, 1)
    one.wait(lambda: one.step() > step)
    assert [worker.pid for worker in one.report().workers] == [pid]


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
    assert not processes.is_alive(pid)
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


def test_the_last_event_is_kept_with_the_order_to_stop(one: OneAgent) -> None:
    one.call("stop_workers", 1, [{"seq": 7, "kind": "ended"}])
    assert [event["seq"] for event in one.call("kept_events")] == [7]


def test_release_leaves_no_process_and_no_file(one: OneAgent) -> None:
    one.call("fence", 1, 1)
    pid = one.form(1)
    one.call("release")
    assert not one.root.exists()
    assert not processes.is_alive(pid)


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


def named(parent: int, name: str) -> int:
    """The child of `parent` that bears this name."""
    for thread in Path(f"/proc/{parent}/task").iterdir():
        for child in (thread / "children").read_text().split():
            if Path(f"/proc/{child}/comm").read_text().strip() == name:
                return int(child)
    raise LookupError(name)
