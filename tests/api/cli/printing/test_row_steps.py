"""The steps of a job in a list: those that its present attempt continues, or that it starts."""

from __future__ import annotations

import pytest

from holdfast.cli.printing.output import row_steps
from holdfast_service.job_model.lifecycle import Desired, State
from holdfast_service.views.jobs import WaitingView
from holdfast_service.views.lists import JobRow

JOINING = WaitingView(resource="start", reason="rank 1 to join", since=1.0, until=121.0)
NODE = WaitingView(resource="node for rank 1", reason="waiting for a node", since=1.0, until=61.0)


def row(attempt: int, waiting: WaitingView | None) -> JobRow:
    unknown = dict.fromkeys(JobRow.model_fields)
    known = {
        "id": "a",
        "name": "a",
        "state": State.RECOVERING,
        "desired": Desired.RUNNING,
        "step": 61,
        "attempt": attempt,
        "incidents": 1,
        "goodput_settled": False,
        "created_at": 1.0,
        "event_seq": 1,
        "waiting": waiting,
    }
    return JobRow.model_validate({**unknown, **known})


@pytest.mark.parametrize(
    ("attempt", "waiting", "shown"),
    [
        (3, JOINING, "attempt 3 starts"),
        (0, JOINING, "starts"),
        (3, NODE, "61"),
        (3, None, "61"),
    ],
)
def test_a_job_whose_attempt_starts_shows_no_step_of_the_attempt_before(
    attempt: int, waiting: WaitingView | None, shown: str
) -> None:
    assert row_steps(row(attempt, waiting)) == shown
