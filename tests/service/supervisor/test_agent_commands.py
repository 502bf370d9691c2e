"""Commands to agents: each ends in an input with its answer or its failure."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from holdfast_service.recovery.core_state import effects, inputs
from holdfast_service.supervisor.agent_commands import AgentCommands, CallTimes
from holdfast_service.supervisor.event_log import EventLog
from holdfast_service.supervisor.fence_file import FenceFile
from holdfast_workers.protocol.messages import Partner


class FakeAgent:
    """Answers every call with `outcome`."""

    seats = ("n0",)

    def __init__(self, outcome: Exception | None) -> None:
        self.outcome = outcome

    def call(self, seat: str, method: str, *args: Any, timeout_s: float) -> Future[Any]:
        del seat, method, args, timeout_s
        call: Future[Any] = Future()
        if self.outcome is None:
            call.set_result(None)
        else:
            call.set_exception(self.outcome)
        return call


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (None, inputs.PartnersSet("n0", 3, 1, ("n2", "n1"), "life")),
        (
            TimeoutError("no answer"),
            inputs.CommandFailed("n0", "set_partners", 3, "TimeoutError: no answer", "life"),
        ),
    ],
)
def test_partners_are_set_only_after_their_agent_confirmed_it(
    tmp_path: Path, outcome: Exception | None, expected: inputs.Input
) -> None:
    submitted: list[inputs.Input] = []
    commands = AgentCommands(
        FakeAgent(outcome),  # type: ignore[arg-type]
        EventLog(),
        FenceFile(tmp_path),
        submitted.append,
        CallTimes(call_s=1.0, form_call_s=1.0, finalize_s=1.0),
        1.0,
        1.0,
    )
    partners = (Partner("n2", "h2", 2), Partner("n1", "h1", 1))
    effect = effects.SetPartners("n0", 3, 1, partners, "life")
    commands.handlers()[effects.SetPartners](effect)
    assert submitted == [expected]
