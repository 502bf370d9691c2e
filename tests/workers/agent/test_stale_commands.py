"""An agent obeys one supervisor and one attempt: it refuses every command of an older one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from tests.support.nodes.agent_config import agent_config
from tests.support.protocol.messages import example

from holdfast_workers.agent.node_agent import NodeAgent
from holdfast_workers.errors import StaleCommand
from holdfast_workers.protocol.answers import AgentReport, KeptEvents
from holdfast_workers.protocol.commands import (
    AttemptCommand,
    Command,
    Fence,
    ListEvents,
    OpenQuery,
    Query,
    Request,
)
from holdfast_workers.protocol.messages import SupervisorEvent

KINDS: tuple[type, ...] = get_args(Command | Query)
EVENT = SupervisorEvent(1, 2.0, "phase", {})


@pytest.fixture
def agent(shm: Path) -> Iterator[NodeAgent]:
    """An agent, without processes, that knows supervisor 5 and attempt 7."""
    made = NodeAgent(agent_config(shm / "n0"), lambda _: None)
    report = made.execute(Request(Fence("n0", 7), epoch=5))
    assert isinstance(report, AgentReport) and (report.epoch, report.attempt) == (5, 7)
    yield made
    made.release()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_command_of_an_older_supervisor_is_refused(agent: NodeAgent, kind: type) -> None:
    request = Request(example(kind), epoch=4, events=(EVENT,))
    if issubclass(kind, OpenQuery):
        agent.execute(request)
        return
    with pytest.raises(StaleCommand, match="epoch 4 is older than 5"):
        agent.execute(request)
    assert agent.execute(Request(ListEvents())) == KeptEvents(()), "nor are its events kept"


@pytest.mark.parametrize("kind", get_args(AttemptCommand), ids=lambda kind: kind.__name__)
def test_a_command_of_an_older_attempt_is_refused(agent: NodeAgent, kind: type) -> None:
    with pytest.raises(StaleCommand, match="attempt 3 is older than 7"):
        agent.execute(Request(example(kind), epoch=5))


def test_an_agent_can_carry_out_every_command(agent: NodeAgent) -> None:
    assert agent._handlers.keys() == set(KINDS)
