"""New nodes exchange bytes, over real connections that fail for real."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.support.faults.faulty_link import Direction, Fault, FaultType, FaultyLink
from tests.support.waiting import DEADLINE_S

from holdfast_service.recovery.core_state.inputs import LinkChecked
from holdfast_service.supervisor.link_check import LinkChecker
from holdfast_workers.memory import link_probe, wire
from holdfast_workers.memory.data_server import DataServer
from holdfast_workers.memory.link_probe import exchange
from holdfast_workers.memory.segment_store import SegmentStore
from holdfast_workers.memory.wire import Timeouts
from holdfast_workers.protocol.answers import AgentReport, ExchangeResult
from holdfast_workers.protocol.commands import ExchangeBytes, Request

SECRET = b"s" * 32


class Nodes:
    """Agents with real data servers; the reported port of a node may lead elsewhere."""

    def __init__(self, folder: Path, count: int) -> None:
        self.servers = {
            f"n{index}": DataServer(
                SegmentStore(folder / f"n{index}", "dp_shard=1", on_quarantine=lambda _: None),
                SECRET,
                "127.0.0.1",
            )
            for index in range(count)
        }
        self.cut: set[str] = set()
        self.fail_once: set[str] = set()  # agents whose exchanges fail in one round
        self.fails: list[str] = []
        self.asked: list[str] = []
        self._pool = ThreadPoolExecutor(8)

    def report(self, agent: str) -> AgentReport:
        port = _closed_port() if agent in self.cut else self.servers[agent].port
        return AgentReport(agent, "i", agent, "127.0.0.1", 1, port, 0, 2, 0, 0, False)

    def reports(self) -> list[AgentReport]:
        return [self.report(agent) for agent in self.servers]

    def call(self, seat: str, request: Request, answer: type, *, timeout_s: float) -> Future[Any]:
        command = request.command
        assert isinstance(command, ExchangeBytes) and answer is ExchangeResult and timeout_s > 0
        self.asked.append(seat)
        port = command.port
        for agent in tuple(self.fail_once):
            if agent == seat or port == self.servers[agent].port:
                self.fails.append(agent)
                port = _closed_port()
                if len(self.fails) == 2:
                    self.fail_once = set()
        if seat in self.cut:
            port = _closed_port()
        return self._pool.submit(
            lambda: ExchangeResult(exchange(SECRET, command.host, port, command.timeout_s))
        )

    def close(self) -> None:
        for server in self.servers.values():
            server.close()


def _closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as door:
        return int(door.getsockname()[1])


@pytest.fixture
def nodes(shm: Path) -> Iterator[Nodes]:
    made = Nodes(shm, 3)
    yield made
    made.close()


def test_an_unreachable_node_is_distinguished_from_its_partners(nodes: Nodes) -> None:
    received: queue.Queue[LinkChecked] = queue.Queue()
    nodes.cut = {"n1"}
    LinkChecker(nodes, received.put, DEADLINE_S, 0.01, 0.01).refresh(nodes.reports(), 1)  # type: ignore[arg-type]
    failed = received.get(timeout=DEADLINE_S)
    assert (failed.agent, failed.incarnation) == ("n1", "i")
    assert "ConnectionRefused" in failed.why


def test_a_reachable_node_is_cleared_and_a_single_failure_accuses_no_node(
    nodes: Nodes,
) -> None:
    received: queue.Queue[LinkChecked] = queue.Queue()
    exchanges = LinkChecker(nodes, received.put, DEADLINE_S, 0.01, 0.0)  # type: ignore[arg-type]
    nodes.fail_once = {"n1"}
    exchanges.refresh(nodes.reports(), 1)
    assert exchanges.wait(DEADLINE_S) and received.empty()
    exchanges = LinkChecker(nodes, received.put, DEADLINE_S, 0.01, 0.0)  # type: ignore[arg-type]
    nodes.cut = {"n1"}
    exchanges.refresh(nodes.reports(), 1)
    assert exchanges.wait(DEADLINE_S) and received.get(timeout=DEADLINE_S).why
    nodes.cut = set()
    exchanges.refresh(nodes.reports(), 1)
    assert exchanges.wait(DEADLINE_S)
    assert received.get(timeout=DEADLINE_S) == LinkChecked("n1", "i", "")
    assert received.empty()


def test_healthy_nodes_are_tested_once_and_not_reported(nodes: Nodes) -> None:
    received: queue.Queue[LinkChecked] = queue.Queue()
    exchanges = LinkChecker(nodes, received.put, DEADLINE_S, 0.01, 0.01)  # type: ignore[arg-type]
    exchanges.refresh(nodes.reports()[:1], 1)
    assert not nodes.asked, "there is no partner for an exchange"
    exchanges.refresh(nodes.reports(), 1)
    assert exchanges.wait(DEADLINE_S)
    exchanges.refresh(nodes.reports(), 1)
    assert exchanges.wait(DEADLINE_S)
    assert sorted(nodes.asked) == ["n0", "n2"] and received.empty()


def test_corrupted_bytes_are_detected_and_an_unauthorised_peer_is_refused(nodes: Nodes) -> None:
    port = nodes.servers["n0"].port
    assert exchange(SECRET, "127.0.0.1", port, DEADLINE_S) == ""
    assert "unauthorised" in exchange(b"x" * 32, "127.0.0.1", port, DEADLINE_S)
    for way in Direction:
        link = FaultyLink(port)
        link.arm(Fault(FaultType.FLIP, way, 1 << 20))
        assert exchange(SECRET, "127.0.0.1", link.port, DEADLINE_S) != "", way
        link.close()


@pytest.mark.slow
def test_an_exchange_meets_its_deadline_with_a_slow_and_then_silent_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The peer greets late and then reads nothing. Only the deadline of the whole exchange ends
    within the time of a test."""
    hour = Timeouts(3600.0, 3600.0, 3600.0)
    monkeypatch.setattr(link_probe, "DEFAULT_TIMEOUTS", hour)
    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)

        def serve() -> None:
            peer, _ = listening.accept()
            with peer:
                done.wait(1.4)
                wire.admit(peer, SECRET, hour)
                done.wait()

        server = threading.Thread(target=serve)
        server.start()
        problem = exchange(SECRET, "127.0.0.1", listening.getsockname()[1], 2.0)
        done.set()
        server.join()
    assert "TimeoutError" in problem
