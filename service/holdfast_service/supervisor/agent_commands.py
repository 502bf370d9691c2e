"""Sends the recovery core's commands to agents.

The answer or failure of a command becomes an input of the core. Every call has a deadline and
completes on another thread. Only the orders of a new world wait, for a short time, until the fence
has stored its attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from holdfast_service.recovery.core_state import inputs
from holdfast_service.supervisor.agent_watch import Agents
from holdfast_service.supervisor.event_log import EventLog
from holdfast_service.supervisor.fence_record import FenceRecord
from holdfast_workers.protocol import commands
from holdfast_workers.protocol.answers import (
    AgentReport,
    Done,
    Inspections,
    PublishedCheckpoint,
    RequestRefused,
)
from holdfast_workers.protocol.commands import Command, CommandKind, Request


@dataclass(frozen=True)
class CallTimes:
    """Deadlines of calls to agents, in seconds."""

    call_s: float = 10.0
    form_call_s: float = 100.0
    """Long enough for an agent whose zygote has just died to start another, which imports torch.
    The lifeline detects an agent that dies meanwhile."""
    finalize_s: float = 120.0
    check_s: float = 45.0
    """How long the check of a node before it is used may take."""
    fence_store_s: float = 2.0
    """How long the orders of a new world wait for the storage of the fence."""


_CARRIES_EVENTS = commands.Fence | commands.Form | commands.Finish | commands.Stop
"""Commands that carry the newest events: if the supervisor dies before they are stored, the agents
still know the attempt or the outcome."""


class AgentCommands:
    """Sends commands under `epoch`, this supervisor's epoch; agents refuse a lower epoch.

    `epoch` is 0 until the supervisor has chosen its epoch.
    """

    def __init__(
        self,
        agents: Agents,
        events: EventLog,
        fence: FenceRecord,
        submit_input: Callable[[inputs.Input], None],
        times: CallTimes,
        fence_timeout_s: float,
        inspect_timeout_s: float,
    ) -> None:
        self.epoch = 0
        self._agents = agents
        self._events = events
        self._fence = fence
        self._fence_store_s = times.fence_store_s
        self._submit_input = submit_input
        self._default_s = times.call_s
        self._deadlines: Mapping[CommandKind, float] = {
            CommandKind.FENCE: fence_timeout_s,
            CommandKind.FORM: times.form_call_s,
            CommandKind.WARM_UP: times.form_call_s,
            CommandKind.PREPARE_MESH: times.form_call_s,
            CommandKind.SAVE_SHARD: times.form_call_s,
            CommandKind.INSPECT: inspect_timeout_s,
            CommandKind.FINALIZE_CHECKPOINT: times.finalize_s,
            CommandKind.CHECK_NODE: times.check_s,
        }

    def send(self, command: Command) -> None:
        """Send a command; its answer or its failure is submitted as an input.

        Until a world is formed, its attempt has no process that a later supervisor could meet: so
        storing the number may take as long as the fence.
        """
        if isinstance(command, commands.Fence):
            self._fence.announce(command.attempt)
        elif isinstance(command, commands.Form):
            self._fence.wait_stored(command.attempt, self._fence_store_s)
            if self._fence.is_superseded:
                return  # this supervisor ends before its next input
        call = self._call(command)
        call.add_done_callback(lambda done: self._on_answer(command, done))

    def stop_all_workers(self) -> None:
        """End every worker on every agent, because the job is over."""
        for seat in self._agents.seats:
            self._call(commands.Stop(seat, "the job has ended"))

    def _call(self, command: Command) -> Future[Any]:
        events = (
            self._events.not_backed_up_by(command.agent, command.incarnation)
            if isinstance(command, _CARRIES_EVENTS)
            else ()
        )
        return self._agents.call(
            command.agent,
            Request(command, self.epoch, events),
            _ANSWERS.get(command.kind, Done),
            timeout_s=self._deadlines.get(command.kind, self._default_s),
        )

    def _on_answer(self, command: Command, call: Future[Any]) -> None:
        if call.cancelled():
            return
        error = call.exception()
        answer = _failure(command, error) if error is not None else _input(command, call.result())
        if answer is not None:
            self._submit_input(answer)


_ANSWERS: Mapping[CommandKind, type] = {
    CommandKind.FENCE: AgentReport,
    CommandKind.INSPECT: Inspections,
    CommandKind.FINALIZE_CHECKPOINT: PublishedCheckpoint,
    CommandKind.CHECK_NODE: AgentReport,
}
"""The answer of each kind of command that has another than `Done`."""


def _input(command: Command, answer: Any) -> inputs.Input | None:  # noqa: PLR0911  (one per kind)
    """The input that reports the answer of a command; None if the core does not wait for it."""
    match command:
        case commands.Fence(agent=agent, attempt=attempt):
            return inputs.Fenced(agent, attempt, answer)
        case commands.SetPartners():
            names = tuple(partner.agent for partner in command.partners)
            return inputs.PartnersSet(
                command.agent, command.attempt, command.rank, names, command.incarnation
            )
        case commands.PrepareMesh(agent=agent, attempt=attempt):
            return inputs.MeshPrepared(agent, attempt)
        case commands.Inspect():
            return inputs.Inspected(
                command.agent,
                command.attempt,
                command.number,
                answer.inspections,
                command.incarnation,
            )
        case commands.FinalizeCheckpoint(step=step, attempt=attempt):
            return inputs.CheckpointFinalized(
                step, attempt, answer.uri, answer.nbytes, answer.metrics
            )
        case commands.CheckNode():
            return inputs.NodeChecked(answer)
        case _:
            return None


def _failure(command: Command, error: BaseException) -> inputs.CommandFailed:
    refused = isinstance(error, RequestRefused)
    why = str(error) if refused else f"{type(error).__name__}: {error}"
    return inputs.CommandFailed(
        agent=command.agent,
        command=command.kind,
        attempt=getattr(command, "attempt", 0),
        why=why[:500],
        incarnation=command.incarnation,
        step=getattr(command, "step", 0),
        refused=isinstance(error, RequestRefused) and error.later,
        number=getattr(command, "number", 0),
    )
