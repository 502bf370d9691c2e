"""What counts as a loss of an agent: the proven end of its process, or silence; never a reset."""

from __future__ import annotations

import queue
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tests.service.supervisor.test_supervisor_shell import (
    SECRET,
    WAIT_S,
    FakeAgents,
    report,
    watching,
)
from tests.support.faults.faulty_link import FaultyLink
from tests.support.waiting import eventually

from holdfast_service.recovery.core_state import inputs
from holdfast_service.supervisor.agent_watch import AgentWatch
from holdfast_workers.ipc.linux_processes import has_ended, identify
from holdfast_workers.memory.data_server import DataServer
from holdfast_workers.memory.segment_store import SegmentStore
from holdfast_workers.protocol.process_identity import ProcessIdentity

HEARTBEAT_TIMEOUT_S = 2.0


@dataclass
class Watched:
    """An agent that a watch has met, behind a proxy."""

    agents: FakeAgents
    proxy: FaultyLink
    watch: AgentWatch
    received: queue.Queue[inputs.Input]

    def is_connected(self) -> bool:
        """Whether the present agent beats, and nothing is being asked about its process."""
        lines = dict(self.watch._lifelines._lines)
        present = [f"{report.agent} {report.incarnation}" for report in self.watch.reports]
        beats = [name for name, line in lines.items() if line.beat]
        return list(lines) == beats == present and not self.watch._inquiries

    def reset(self) -> None:
        """Reset the lifeline, which the watch has noticed when this returns."""
        asked = len(self.agents.calls)
        self.proxy.reset()
        eventually(lambda: len(self.agents.calls) > asked)

    def lose(self) -> inputs.AgentLost:
        lost = self.received.get(timeout=WAIT_S)
        assert isinstance(lost, inputs.AgentLost)
        return lost


@pytest.fixture
def watched(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Watched]:
    """The parameter: after how long a silence the agent is lost; else after none in a test."""
    server = DataServer(SegmentStore(tmp_path, "tp=1"), SECRET, "127.0.0.1", heartbeat_s=0.02)
    proxy = FaultyLink(server.port)
    agents = FakeAgents(lambda: True)
    agents.life = report("a", proxy.port)
    watch, received = watching(agents, 60.0, getattr(request, "param", 3600.0))
    watch.refresh(1)
    assert isinstance(received.get(timeout=WAIT_S), inputs.AgentUp)
    watched = Watched(agents, proxy, watch, received)
    eventually(watched.is_connected)
    yield watched
    watch.close()
    proxy.close()
    server.close()


def test_resets_are_no_loss_of_an_agent_that_answers(watched: Watched) -> None:
    for _ in range(20):
        watched.reset()
        eventually(watched.is_connected)
    assert watched.received.empty()
    assert watched.watch.reports == [watched.agents.life]


@pytest.mark.seconds
@pytest.mark.parametrize("watched", [HEARTBEAT_TIMEOUT_S], indirect=True)
def test_refused_connections_are_a_loss_after_the_timeout_that_proves_nothing(
    watched: Watched,
) -> None:
    began = time.monotonic()
    watched.proxy.refuses = True
    watched.proxy.reset()
    lost = watched.lose()
    assert (lost.incarnation, lost.certain) == ("a", False)
    assert time.monotonic() - began >= HEARTBEAT_TIMEOUT_S / 2
    assert watched.received.get(timeout=WAIT_S) == inputs.LeaseEnded("n0", "a")


def test_an_end_that_the_cluster_knows_is_certain_at_once(watched: Watched) -> None:
    watched.agents.ended, watched.agents.life = True, None
    watched.proxy.refuses = True
    watched.proxy.reset()
    lost = watched.lose()
    assert (lost.incarnation, lost.certain) == ("a", True)


def test_the_kernel_of_the_same_machine_knows_more_than_the_cluster(watched: Watched) -> None:
    process = subprocess.Popen(["sleep", "infinity"])
    life = replace(report("b", watched.proxy.port), process=identify(process.pid))
    watched.agents.life, watched.agents.ended = life, True
    watched.watch._send_hello("n0", 1)
    assert watched.received.get(timeout=WAIT_S) == inputs.AgentUp(life)
    ended = inputs.LeaseEnded("n0", "a", certain=True)
    assert watched.received.get(timeout=WAIT_S) == ended
    eventually(watched.is_connected)
    watched.reset()
    eventually(watched.is_connected)
    assert watched.received.empty(), "the process lives"
    watched.agents.life = None
    process.kill()
    process.wait()
    watched.proxy.reset()
    lost = watched.lose()
    assert (lost.incarnation, lost.certain) == ("b", True)


def test_a_process_has_ended_only_as_a_whole_and_as_its_own_kernel_knows() -> None:
    process = subprocess.Popen(["sleep", "infinity"])
    identity = identify(process.pid, "node")
    assert has_ended(identity) is False
    assert has_ended(replace(identity, started=identity.started - 1)) is True, "a reused id"
    assert has_ended(replace(identity, kernel="another")) is None
    process.kill()
    eventually(lambda: has_ended(identity) is True)  # a zombie has ended
    process.wait()
    assert has_ended(identity) is True
    assert has_ended(ProcessIdentity("", 1, 0)) is None
