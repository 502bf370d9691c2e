"""Commands to agents: each carries what its agent needs, and ends in an answer or a failure."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from holdfast_service.job_model.events.progress import PhaseEvent
from holdfast_service.job_model.lifecycle import Phase
from holdfast_service.recovery.core_state import inputs
from holdfast_service.supervisor.agent_commands import AgentCommands
from holdfast_service.supervisor.event_log import EventLog
from holdfast_service.supervisor.fence_record import FenceRecord, open_fence
from holdfast_service.supervisor.supervisor_times import SupervisorTimes
from holdfast_workers.checkpoint.fence_objects import FenceFloor
from holdfast_workers.protocol.answers import (
    AgentReport,
    Done,
    Inspections,
    PublishedCheckpoint,
    Refusal,
    RequestRefused,
)
from holdfast_workers.protocol.commands import (
    CheckNode,
    Command,
    CommandKind,
    Fence,
    FinalizeCheckpoint,
    Form,
    Inspect,
    Request,
    SetPartners,
    Stop,
    WarmUp,
)
from holdfast_workers.protocol.messages import FormOrder, Partner
from holdfast_workers.protocol.processes import StorageOptions

TIMES = SupervisorTimes(call_s=1.0, form_call_s=2.0, finalize_s=3.0, check_s=4.0)
WAIT_S = 60.0
REPORT = AgentReport("n0", "life", "node", "127.0.0.1", 1, 2, 3, 2, 0, 0, True)


@dataclass
class FakeAgent:
    """Answers every request with `outcome`."""

    outcome: object
    seats = ("n0",)
    request: Request | None = None
    answer: type | None = None
    timeout_s: float = 0.0
    on_call: Callable[[], None] = lambda: None

    def call(self, seat: str, request: Request, answer: type, *, timeout_s: float) -> Future[Any]:
        self.on_call()
        self.request, self.answer, self.timeout_s = request, answer, timeout_s
        call: Future[Any] = Future()
        if isinstance(self.outcome, Exception):
            call.set_exception(self.outcome)
        else:
            call.set_result(self.outcome)
        return call


def fence_in(folder: Path) -> FenceRecord:
    return FenceRecord(open_fence(str(folder / "remote"), StorageOptions()))


def commands_to(
    agent: FakeAgent,
    fence: FenceRecord,
    submit_input: Callable[[inputs.Input], None],
    events: EventLog | None = None,
) -> AgentCommands:
    commands = AgentCommands(
        agent,  # type: ignore[arg-type]
        events or EventLog(),
        fence,
        submit_input,
        TIMES,
        5.0,
        6.0,
    )
    commands.epoch = 5
    return commands


def sent(folder: Path, command: Command, outcome: object) -> tuple[FakeAgent, list[inputs.Input]]:
    """The agent that got the command under epoch 5, and the inputs that followed."""
    submitted: list[inputs.Input] = []
    agent, events = FakeAgent(outcome), EventLog()
    events.append(PhaseEvent(phase=Phase.RUNNING))
    fence = fence_in(folder)
    assert fence.claim(5, WAIT_S) == 5
    commands = commands_to(agent, fence, submitted.append, events)
    commands.send(command)
    fence.close()
    assert agent.request is not None and (agent.request.command, agent.request.epoch) == (
        command,
        5,
    )
    return agent, submitted


PARTNERS = SetPartners("n0", 3, 1, (Partner("n2", "h2", 2), Partner("n1", "h1", 1)), "life")
PUBLISHED = PublishedCheckpoint("file:/c", 10, {"loss": 0.5})


@pytest.mark.parametrize(
    ("command", "answer", "timeout_s", "expected"),
    [
        (Fence("n0", 3, "life"), REPORT, 5.0, inputs.Fenced("n0", 3, REPORT)),
        (PARTNERS, Done(), 1.0, inputs.PartnersSet("n0", 3, 1, ("n2", "n1"), "life")),
        (
            Inspect("n0", 3, 9, "life"),
            Inspections(()),
            6.0,
            inputs.Inspected("n0", 3, 9, (), "life"),
        ),
        (
            FinalizeCheckpoint("n0", 40, 3, "life"),
            PUBLISHED,
            3.0,
            inputs.CheckpointFinalized(40, 3, "file:/c", 10, {"loss": 0.5}),
        ),
        (CheckNode("n0", "life"), REPORT, 4.0, inputs.NodeChecked(REPORT)),
        (WarmUp("n0", 3, "life"), Done(), 2.0, None),
        (Stop("n0", "over", "life"), Done(), 1.0, None),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_each_command_has_its_deadline_and_its_answer(
    tmp_path: Path, command: Command, answer: object, timeout_s: float, expected: inputs.Input
) -> None:
    agent, submitted = sent(tmp_path, command, answer)
    assert (agent.answer, agent.timeout_s) == (type(answer), timeout_s)
    assert submitted == ([expected] if expected is not None else [])


def test_a_failed_command_is_reported_with_all_that_identifies_it(tmp_path: Path) -> None:
    _, submitted = sent(tmp_path, PARTNERS, TimeoutError("no answer"))
    assert submitted == [
        inputs.CommandFailed("n0", CommandKind.SET_PARTNERS, 3, "TimeoutError: no answer", "life")
    ]


def test_a_refused_manifest_may_be_tried_again(tmp_path: Path) -> None:
    refused = RequestRefused(Refusal("RemoteTierRefused", "503", later=True))
    _, submitted = sent(tmp_path, FinalizeCheckpoint("n0", 40, 3, "life"), refused)
    assert submitted == [
        inputs.CommandFailed(
            "n0",
            CommandKind.FINALIZE_CHECKPOINT,
            3,
            "RemoteTierRefused: 503",
            "life",
            step=40,
            refused=True,
        )
    ]


def test_a_fence_carries_the_newest_events_and_other_commands_carry_none(tmp_path: Path) -> None:
    agent, _ = sent(tmp_path, Fence("n0", 3, "life"), REPORT)
    assert agent.request is not None
    assert [event.data for event in agent.request.events] == [{"phase": "RUNNING"}]
    agent, _ = sent(tmp_path / "other", PARTNERS, Done())
    assert agent.request is not None and agent.request.events == ()


def test_a_world_is_ordered_only_after_its_attempt_is_stored(tmp_path: Path) -> None:
    fence, agent = fence_in(tmp_path), FakeAgent(Done())
    assert fence.claim(5, WAIT_S) == 5
    commands = commands_to(agent, fence, lambda _: None)
    commands.send(Fence("n0", 3, "life"))
    order = FormOrder(3, {"dp_shard": 1}, 1, "127.0.0.1", 1, ())
    agent.on_call = lambda: floors.append(fence_in(tmp_path).read(WAIT_S))
    floors: list[FenceFloor | None] = []
    commands.send(Form("n0", order, "life"))
    assert floors == [FenceFloor(5, 3)]
    fence.is_superseded = True
    commands.send(Form("n0", order, "life"))
    assert len(floors) == 1, "a later supervisor forms the next world"
    fence.close()
