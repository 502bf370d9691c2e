"""A job's verdict is true, short and made for reading, in every state."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast_service.job_model.lifecycle import Desired, State
from holdfast_service.policy.causes import Cause
from holdfast_service.readers.verdict import (
    LastIncident,
    Standing,
    cause_in_words,
    duration,
    verdict,
)

RUNNING = Standing(
    state=State.RUNNING,
    desired=Desired.RUNNING,
    now=10_000.0,
    created_at=1_000.0,
    started_at=2_000.0,
    ended_at=None,
    step=400,
    steps=1000,
    attempt=1,
    devices=8,
    eta_s=1200.0,
    goodput=0.9,
    held_s=8_000.0,
    lost_s=360.0,
    told_at=9_999.0,
)
FAULT = LastIncident(
    number=3,
    cause="node_lost",
    closed_at=9_400.0,
    opened_at=9_399.0,
    decision="replace_node",
    steps_lost=1,
    total_s=0.8,
)


def test_a_job_that_trains() -> None:
    told = verdict(RUNNING)
    assert told.headline == "Training"
    assert told.doing == "It trains, step 400 of 1,000."
    assert told.last == "It started 2 h 13 min ago; no fault so far."
    assert told.next == "600 steps to go: about 20 min at this pace."
    assert told.device_hours_used == pytest.approx(8_000 * 8 / 3600)
    assert told.device_hours_lost == pytest.approx(0.8)
    assert told.fresh_at == 9_999.0


def test_a_recovered_fault_is_what_happened_last() -> None:
    told = verdict(replace(RUNNING, incidents=3, last=FAULT))
    assert told.last == "Incident 3 of 3, a lost node, was over in 0.8 s, 1 step lost, 10 min ago."


def test_a_job_that_recovers_says_from_what_and_what_it_waits_for() -> None:
    told = verdict(
        replace(
            RUNNING,
            state=State.RECOVERING,
            incidents=3,
            last=replace(FAULT, closed_at=None),
            waiting_for="a replacement node",
            waiting_until=10_030.0,
        )
    )
    assert told.headline == "Recovering from a lost node"
    assert "It waits, for 30 s more at most: a replacement node." in told.doing
    assert told.last is not None and "is open; decided: replace node" in told.last


def test_one_that_failed_says_why_and_what_is_kept() -> None:
    told = verdict(
        replace(
            RUNNING,
            state=State.FAILED,
            ended_at=9_000.0,
            outcome_code="user_error",
            outcome_message="ValueError: no such column\ntraceback",
            saved_step=300,
        )
    )
    assert (told.headline, told.doing) == ("Failed: user error", "ValueError: no such column.")
    assert told.next == "Its state at step 300 is kept: another job can begin with it."
    assert told.fresh_at == 9_000.0


@pytest.mark.parametrize("state", list(State))
def test_every_state_has_words(state: State) -> None:
    for desired in Desired:
        told = verdict(replace(RUNNING, state=state, desired=desired, ended_at=9_000.0, last=FAULT))
        assert told.headline and told.doing.endswith(".")
        assert "None" not in " ".join(filter(None, (told.doing, told.last, told.next)))


@pytest.mark.parametrize("cause", list(Cause))
def test_every_cause_has_words(cause: Cause) -> None:
    assert cause_in_words(cause) != cause.replace("_", " ") or cause in (Cause.HANG,)
    assert "_" not in cause_in_words(cause)


def test_durations_are_read_at_a_glance() -> None:
    told = [duration(one) for one in (0.2, 45, 720, 12_000, 7_200, 187_200)]
    assert told == ["0.2 s", "45 s", "12 min", "3 h 20 min", "2 h", "2 d 4 h"]
