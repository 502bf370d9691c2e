"""A job's verdict is true, short and readable in every state."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from holdfast_service.job_model.events.incidents import IncidentRecord
from holdfast_service.job_model.lifecycle import Desired, State
from holdfast_service.job_model.program_levels import ProgramLevel
from holdfast_service.readers.verdict import (
    FaultCost,
    JobStanding,
    duration,
    verdict,
)
from holdfast_service.views.jobs import WaitingView

RUNNING = JobStanding(
    state=State.RUNNING,
    desired=Desired.RUNNING,
    now=10_000.0,
    created_at=1_000.0,
    started_at=2_000.0,
    ended_at=None,
    step=400,
    steps=1000,
    attempt=1,
    eta_s=1200.0,
    goodput=0.9,
    held_device_s=8_000.0 * 8,
    lost_device_s=360.0 * 8,
    reported_at=9_999.0,
)
INCIDENT = IncidentRecord(
    incident=3,
    cause="node_lost",
    closed_at=9_400.0,
    opened_at=9_399.0,
    decision="replace_node",
    steps_lost=1,
    phases_s={"total": 0.8},
)


def test_a_training_job() -> None:
    result = verdict(RUNNING)
    assert result.headline == "Training"
    assert result.doing == "Training at step 400 of 1,000."
    assert result.last == "The job started 2 h 13 min ago; no faults so far."
    assert result.next == "600 steps left: about 20 min at this pace."
    assert result.device_hours_used == pytest.approx(8_000 * 8 / 3600)
    assert result.device_hours_lost == pytest.approx(0.8)
    assert result.fresh_at == 9_999.0


@pytest.mark.parametrize(
    ("data_wait", "fetch_wait", "advice"),
    [
        (0.099, 0.09, None),
        (0.43, 0.40, "43% of .*: shards do not come fast .* HOLDFAST_CACHE_LIMIT_GB.$"),
        (0.43, 0.01, "43% of .*: the nodes have the shards, .* a faster disk for its cache.$"),
        (0.40, 0.16, "40% of .*: 40% of it for shards .* more bandwidth, .* or a faster disk"),
    ],
)
def test_the_verdict_of_a_job_that_waits_for_data_says_what_helps(
    data_wait: float, fetch_wait: float, advice: str | None
) -> None:
    result = verdict(replace(RUNNING, data_wait=data_wait, fetch_wait=fetch_wait))
    if advice is None:
        assert (result.headline, result.doing) == ("Training", "Training at step 400 of 1,000.")
    else:
        assert result.headline == "Training, slowed by its data"
        assert re.match(f"Training at step 400 of 1,000. {advice}", result.doing)
    if data_wait >= 0.1:
        images = verdict(replace(RUNNING, data_wait=data_wait, reads_shards=False))
        assert "decoded" in images.doing and "processors" in images.doing
        assert not any(word in images.doing for word in ("shards", "cache", "store"))
    starts = WaitingView(resource="start", reason="ranks join", since=9_000.0, until=None)
    waits = replace(RUNNING, data_wait=0.5, state=State.RECOVERING, waiting=starts)
    assert "data" not in verdict(waits).headline


@pytest.mark.parametrize("slow_ranks", [(), (2,)])
def test_a_job_that_stands_for_want_of_data_names_the_rank(slow_ranks: tuple[int, ...]) -> None:
    data = WaitingView(resource="data", reason="rank 3 waits for data", since=9_955.0, until=None)
    result = verdict(replace(RUNNING, waiting=data, slow_ranks=slow_ranks))
    assert result.headline == "Training, slowed by its data"
    assert result.doing == (
        "The job stands after step 400 of 1,000: rank 3 waits for data, for 45 s so far."
    )


@pytest.mark.parametrize(
    ("state", "step", "steps", "doing"),
    [
        (State.RUNNING, 400, None, "Training at step 400."),
        (State.RUNNING, 0, None, "Training at step 0."),
        (
            State.SUCCEEDED,
            400,
            None,
            "The program has ended after step 400; the job took 2 h 30 min.",
        ),
        (State.SUCCEEDED, None, None, "The program has ended; the job took 2 h 30 min."),
        (
            State.SUCCEEDED,
            0,
            None,
            "The program has ended after step 0; the job took 2 h 30 min.",
        ),
        (State.SUCCEEDED, 9, 10, "The program has ended after step 9; the job took 2 h 30 min."),
        (State.SUCCEEDED, 10, 10, "All 10 steps are complete; the job took 2 h 30 min."),
    ],
)
def test_a_program_may_take_a_number_of_steps_that_is_not_known(
    state: State, step: int | None, steps: int | None, doing: str
) -> None:
    result = verdict(replace(RUNNING, state=state, step=step, steps=steps, eta_s=None))
    assert result.doing == doing and (result.next is None or "left" not in result.next)


def test_an_ended_program_names_the_folder_of_its_relative_paths() -> None:
    ended = replace(RUNNING, state=State.SUCCEEDED, level=ProgramLevel.SCRIPT)
    result = verdict(replace(ended, program_folder="/runs/1/cache/programs/4711"))
    assert result.next is not None
    assert result.next.endswith("relative paths are in /runs/1/cache/programs/4711.")


def test_a_resolved_incident_is_the_last_event() -> None:
    result = verdict(replace(RUNNING, incidents=3, last=INCIDENT))
    assert (
        result.last
        == "Incident 3 of 3, a lost node, was resolved 10 min ago in 0.8 s; 1 step lost."
    )


def test_a_recovering_job_names_the_cause_and_the_wait() -> None:
    result = verdict(
        replace(
            RUNNING,
            state=State.RECOVERING,
            incidents=3,
            last=replace(INCIDENT, closed_at=None),
            waiting=WaitingView(
                resource="node", reason="a replacement node", since=9_990.0, until=10_030.0
            ),
        )
    )
    assert result.headline == "Recovering from a lost node"
    assert "Waiting (at most 30 s more): a replacement node." in result.doing
    assert result.last is not None and "is still open; decision: replace node" in result.last


def test_a_failed_job_names_the_error_and_the_saved_state() -> None:
    result = verdict(
        replace(
            RUNNING,
            state=State.FAILED,
            ended_at=9_000.0,
            outcome_code="user_error",
            outcome_message="ValueError: no such column\ntraceback",
            saved_step=300,
            saved_uri="s3://bucket/j/300",
        )
    )
    assert (result.headline, result.doing) == ("Failed: user error", "ValueError: no such column.")
    assert result.next == (
        "The state at step 300 lies in s3://bucket/j/300; another job can start from it."
    )
    assert result.fresh_at == 9_000.0


@pytest.mark.parametrize("state", list(State))
def test_every_state_has_a_description(state: State) -> None:
    for desired in Desired:
        result = verdict(
            replace(RUNNING, state=state, desired=desired, ended_at=9_000.0, last=INCIDENT)
        )
        assert result.headline and result.doing.endswith(".")
        assert "None" not in " ".join(filter(None, (result.doing, result.last, result.next)))


def test_durations_are_short() -> None:
    shown = [duration(seconds) for seconds in (0.2, 45, 720, 734, 3599.7, 12_000, 7_200, 187_200)]
    assert shown == [
        "0.2 s",
        "45 s",
        "12 min",
        "12 min 14 s",
        "1 h",
        "3 h 20 min",
        "2 h",
        "2 d 4 h",
    ]


PROGRAM = replace(
    RUNNING, level=ProgramLevel.PLUGIN, step=61, steps=None, eta_s=None, attempt=3, has_step=False
)
JOINING = WaitingView(resource="start", reason="rank 1 to join", since=9_988.0, until=10_108.0)


@pytest.mark.parametrize("state", [State.STARTING, State.RECOVERING, State.RUNNING])
def test_an_attempt_without_a_step_starts_and_does_not_train_at_the_step_before(
    state: State,
) -> None:
    result = verdict(replace(PROGRAM, state=state, waiting=JOINING))
    assert "Attempt 3 starts: waiting for rank 1 to join, 12 s of 120." in result.doing
    assert "Training" not in result.headline + result.doing


@pytest.mark.parametrize("level", [ProgramLevel.SCRIPT, ProgramLevel.PLUGIN])
@pytest.mark.parametrize("step", [None, 0, 61])
def test_a_running_program_without_a_step_in_this_attempt_says_so(
    level: ProgramLevel, step: int | None
) -> None:
    result = verdict(replace(PROGRAM, level=level, step=step))
    doing = "The program runs; it has reported no step yet."
    assert (result.headline, result.doing) == ("Running", doing)


def test_steps_that_nobody_reads_are_not_steps_that_the_program_does_not_make() -> None:
    silent = replace(PROGRAM, level=ProgramLevel.SCRIPT, step=None, reads_steps=False)
    assert verdict(silent).doing == "The program runs; its steps are not read at this level."


def test_no_step_is_named_of_a_program_that_reports_none() -> None:
    silent = replace(PROGRAM, level=ProgramLevel.SCRIPT, step=None, ended_at=9_000.0)
    for state in State:
        result = verdict(replace(silent, state=state))
        said = " ".join(filter(None, (result.doing, result.last, result.next)))
        assert "step 0" not in said and "newest state" not in said, said


def test_the_incident_that_ended_the_job_was_not_resolved() -> None:
    ended = replace(INCIDENT, decision="stop", steps_lost=None, end_code="user_error")
    result = verdict(replace(RUNNING, state=State.FAILED, ended_at=9_400.0, last=ended))
    assert result.last == "The only incident, a lost node, ended the job."
    paused = verdict(replace(RUNNING, state=State.PAUSED, last=ended))
    assert paused.last is not None and "resolved" not in paused.last


ENDED = replace(RUNNING, state=State.SUCCEEDED, step=1000, ended_at=9_000.0)


@pytest.mark.parametrize(
    ("lost", "expected"),
    [
        ([], "No fault interrupted it."),
        (
            [0],
            "It survived 1 fault, which took 1.5 s until the job ran again (0.80 of 17.78 "
            "device-hours); no step was repeated.",
        ),
        (
            [1],
            "It survived 1 fault, which took 1.5 s until the job ran again (0.80 of 17.78 "
            "device-hours); 1 step was repeated.",
        ),
        (
            [3, 9],
            "It survived 2 faults, which took 3.0 s in all until the job ran again (0.80 of "
            "17.78 device-hours); 12 steps were repeated.",
        ),
        (
            [1, None],
            "It survived 2 faults, which took 3.0 s in all until the job ran again (0.80 of "
            "17.78 device-hours); 1 step or more were repeated.",
        ),
        (
            [None],
            "It survived 1 fault, which took 1.5 s until the job ran again (0.80 of 17.78 "
            "device-hours); how many steps it repeated is not known.",
        ),
    ],
)
def test_the_end_of_a_job_is_summed_up(lost: list[int | None], expected: str) -> None:
    faults = tuple(FaultCost(steps, 1.5, 2880 / len(lost)) for steps in lost)
    result = verdict(replace(ENDED, faults=faults, saved_step=1000, saved_uri="/ckpt/1000"))
    assert result.last == expected
    assert result.next == "The state at step 1,000 lies in /ckpt/1000."


def test_a_loss_that_is_small_beside_all_that_was_used_is_not_nothing() -> None:
    """A level 0 program, whose steps nobody reads."""
    faults = (FaultCost(None, 0.5, 1.1),)
    job = replace(ENDED, level=ProgramLevel.SCRIPT, reads_steps=False, faults=faults)
    short = verdict(replace(job, held_device_s=108.0)).last
    assert short == (
        "It survived 1 fault, which took 0.5 s until the job ran again (1.1 of 108 "
        "device-seconds); how many steps it repeated is not known at this level."
    )
    long = verdict(replace(job, held_device_s=7200.0)).last
    assert long is not None and "(1.1 device-seconds of 2.00 device-hours)" in long


def test_the_result_of_a_program_is_its_own() -> None:
    result = verdict(replace(ENDED, level=ProgramLevel.SCRIPT))
    assert result.next is not None and result.next.startswith("The program's files lie where it")
    assert verdict(replace(ENDED, saved_step=None)).next == "No state of it is saved."


def test_a_fault_beside_the_one_that_ended_the_job_is_counted() -> None:
    ending = replace(INCIDENT, decision="stop", steps_lost=None, end_code="no_progress")
    job = replace(ENDED, incidents=3, last=ending, faults=(FaultCost(2, 1.0, 2880.0),))
    assert verdict(replace(job, state=State.FAILED)).last == (
        "Incident 3 of 3, a lost node, ended the job. It survived 1 fault, which took 1.0 s until "
        "the job ran again (0.80 of 17.78 device-hours); 2 steps were repeated."
    )
    left = verdict(replace(job, state=State.CANCELLED)).last
    assert left is not None and left.startswith("Incident 3 of 3, a lost node, was open when")


def test_steps_that_may_be_lost_are_not_zero() -> None:
    unknown = replace(INCIDENT, level=0, steps_lost=None)
    result = verdict(replace(PROGRAM, level=ProgramLevel.SCRIPT, last=unknown))
    assert result.last is not None and result.last.endswith("; steps lost: not known.")
