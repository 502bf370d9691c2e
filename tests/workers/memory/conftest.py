from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.memory.data_nodes import PATIENT, Node
from tests.support.memory.shm import MESH, AgentProcess
from tests.support.waiting import eventually

from holdfast_workers.memory.peer_tls import PeerTls
from holdfast_workers.memory.wire import Timeouts


@pytest.fixture
def node(shm: Path) -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def start(
        name: str,
        mesh: str = MESH,
        tls: PeerTls | None = None,
        timeouts: Timeouts = PATIENT,
    ) -> Node:
        nodes.append(Node.start(shm, name, mesh, tls, timeouts))
        return nodes[-1]

    before = threading.active_count()
    yield start
    for started in nodes:
        started.close()
    eventually(lambda: threading.active_count() <= before)


@pytest.fixture
def agent(shm: Path) -> Iterator[Callable[[str], AgentProcess]]:
    agents: list[AgentProcess] = []

    def start(name: str) -> AgentProcess:
        agents.append(AgentProcess.start(shm / name))
        return agents[-1]

    yield start
    for process in agents:
        process.end()
