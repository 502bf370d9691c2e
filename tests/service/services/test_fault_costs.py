"""Which incidents of a job it has survived, and what they cost."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from tests.service.views.test_sentences import data_of

from holdfast_service.job_model.goodput import Goodput
from holdfast_service.policy.causes import Cause, Fault
from holdfast_service.policy.incidents import Incident
from holdfast_service.readers.verdict import FaultCost
from holdfast_service.services.overview import _faults

NO_TIME = Goodput(0.0, {}, 0.0, {}, 0, 0)
CRASH = Incident.opened(1, Fault(Cause.WORKER_CRASH, 1, 1.0, "rank 0 ended", rank=0), 1.0)


def _row(number: int, incident: Incident, end_code: str = "") -> Any:
    closed = replace(incident, number=number).closed(2.0, "first_step", "over", end_code)
    took = replace(closed, phases_s={**closed.phases_s, "total": 1.5})
    return SimpleNamespace(number=number, data=data_of(took))


def test_only_faults_that_stopped_the_job_and_did_not_end_it_are_survived() -> None:
    survived = replace(CRASH, decision="restart_worker", steps_lost=2)
    outage = replace(survived, cause=Cause.REMOTE_UNAVAILABLE)
    resize = replace(survived, cause=Cause.RESIZE)
    ignored = replace(survived, decision="ignore")
    rows = [
        _row(1, survived),
        _row(2, outage),
        _row(3, resize),
        _row(4, ignored),
        _row(5, survived, "no_progress"),
    ]
    account = replace(NO_TIME, lost_device_s={1: 12.0, 5: 600.0, None: 3.0})
    assert list(_faults(rows, account)) == [FaultCost(2, 1.5, 12.0)]
