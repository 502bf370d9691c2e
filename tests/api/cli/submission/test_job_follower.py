"""A run that is followed prints each incident once, with its cost, which is known a step later."""

from __future__ import annotations

from io import StringIO
from unittest.mock import MagicMock

import pytest
from rich.console import Console
from tests.service.views.test_sentences import data_of, view_of

from holdfast.cli.submission import job_follower
from holdfast.cli.submission.job_follower import JobFollower
from holdfast_service.policy.causes import Cause, Fault
from holdfast_service.policy.incidents import Incident
from holdfast_service.views.incidents import IncidentView

OPEN = Incident.opened(1, Fault(Cause.WORKER_CRASH, 1, 1.0, "rank 0 ended", rank=0), 1.0)
CLOSED = view_of(data_of(OPEN.closed(2.0, "first_step", "attempt 2 runs")))
KNOWN = CLOSED.model_copy(update={"device_seconds_lost": 2.7, "cost": "2.7 device-seconds"})


def printed(*seen: IncidentView, final: bool = False) -> list[int]:
    """How many lines there are after each look."""
    out = StringIO()
    client = MagicMock()
    follower = JobFollower(client, Console(file=out, width=200))
    counts = []
    for incident in seen:
        client.incidents.return_value = [incident]
        follower._print_incidents("job", final=final)
        counts.append(out.getvalue().count("Incident 1 "))
    return counts


def test_an_incident_is_printed_once_what_it_cost_is_known() -> None:
    assert printed(view_of(data_of(OPEN)), CLOSED, KNOWN, KNOWN) == [0, 0, 1, 1]


def test_a_cost_that_stays_unknown_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert printed(CLOSED, final=True) == [1], "the job has ended"
    monkeypatch.setattr(job_follower, "COST_S", 0.0)
    assert printed(CLOSED, KNOWN) == [1, 1]
