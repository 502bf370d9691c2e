"""Goodput: every moment of a job on the cluster is assigned to exactly one kind of time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast_service.job_model.goodput import (
    AttemptRun,
    CommittedStep,
    Goodput,
    Outage,
    TimeKind,
    account,
    is_lost,
)

STEP_S = 1.0


def steps(
    attempt: int, first: int, last: int, at: float, gap_s: float = 0.0
) -> list[CommittedStep]:
    """Steps of one second each; the first ends at `at`."""
    each = STEP_S + gap_s
    return [
        CommittedStep(attempt, step, at + (step - first) * each, STEP_S)
        for step in range(first, last + 1)
    ]


def spent(of: Goodput) -> dict[str, float]:
    return {kind: seconds for kind, seconds in of.by_kind_s.items() if seconds}


def test_a_job_without_faults_has_starting_productive_and_finishing_time() -> None:
    result = account([(0.0, 20.0)], steps(1, 1, 10, 6.0, 0.1), [AttemptRun(1, 0)], [], ended=True)
    assert spent(result) == {
        "starting": 5.0,
        "productive": 10.0,
        "between_steps": pytest.approx(0.9),
        "finishing": pytest.approx(4.1),
    }
    assert result.goodput == 0.5
    assert result.effective_training_time_ratio == pytest.approx(0.545)
    assert (result.steps, result.steps_replayed) == (10, 0)


def test_a_fault_costs_detection_recovery_phases_and_replayed_steps() -> None:
    # Step 5 ends at 10.0; the fault is seen at 10.5 and ends at 13.0; steps 4 and 5 are repeated.
    rows = [*steps(1, 1, 5, 6.0), *steps(2, 4, 8, 14.0)]
    phases_s = {"detect": 0.25, "fence": 0.5, "form": 1.0, "total": 3.5}
    outage = Outage(10.5, 14.0, phases_s, incident=7)
    result = account(
        [(0.0, 18.0)], rows, [AttemptRun(1, 0), AttemptRun(2, 3, incident=7)], [outage], ended=True
    )
    assert spent(result) == {
        "starting": 5.0,
        "productive": 8.0,
        "replayed": 2.0,
        "detection": 0.5,
        "recovery.detect": 0.25,
        "recovery.fence": 0.5,
        "recovery.form": 1.0,
        "recovery.other": 0.75,
    }
    assert result.steps_replayed == 2
    assert result.held_s == 18.0
    assert result.lost_s == {7: 0.5 + 2.5 + 2.0}


def test_lost_time_is_attributed_to_its_incident() -> None:
    # Incident 1 goes back to step 3, incident 2 to step 1: steps 2 and 3 of attempt 1 are its loss.
    rows = [*steps(1, 1, 4, 1.0), *steps(2, 4, 5, 7.0), *steps(3, 2, 6, 11.0)]
    runs = [AttemptRun(1, 0), AttemptRun(2, 3, incident=1), AttemptRun(3, 1, incident=2)]
    outages = [Outage(4.5, 6.0, incident=1), Outage(8.25, 10.0, {"form": 1.0}, incident=2)]
    result = account([(0.0, 15.0)], rows, runs, outages, ended=True)
    assert result.lost_s == {1: 2.0 + 1.0, 2: 2.0 + 4.0}
    assert result.steps_replayed == 5


def test_lost_time_without_an_incident_is_attributed_to_none() -> None:
    rows = [*steps(1, 1, 3, 1.0), *steps(2, 2, 4, 6.0)]
    result = account([(0.0, 8.0)], rows, [AttemptRun(1, 0), AttemptRun(2, 1)], [], ended=True)
    assert result.lost_s == {None: 2.0 + 2.0}
    live = account(
        [(0.0, 6.0)], steps(1, 1, 3, 1.0), [AttemptRun(1, 0)], [Outage(4.0, None)], ended=False
    )
    assert sum(live.lost_s.values()) == 3.0


def test_time_off_the_cluster_is_not_counted() -> None:
    rows = [*steps(1, 1, 3, 3.0), *steps(2, 4, 5, 103.0)]
    held = [(1.0, 6.0), (100.0, 105.0)]
    result = account(held, rows, [AttemptRun(1, 0), AttemptRun(2, 3)], [], ended=True)
    assert result.held_s == 10.0
    assert spent(result) == {"starting": 3.0, "productive": 5.0, "finishing": 2.0}


def test_a_live_job_in_recovery_is_accounted_as_recovering() -> None:
    outage = Outage(4.0, None, {"fence": 0.5})
    result = account([(0.0, 6.0)], steps(1, 1, 3, 1.0), [AttemptRun(1, 0)], [outage], ended=False)
    assert spent(result) == {
        "productive": 3.0,
        "detection": 1.0,
        "recovery.fence": 0.5,
        "recovery.other": 1.5,
    }


def test_a_job_that_never_held_resources_has_no_ratio() -> None:
    result = account([], [], [], [], ended=False)
    assert (result.goodput, result.effective_training_time_ratio, result.held_s) == (
        None,
        None,
        0.0,
    )


TIMES = st.floats(0.0, 1000.0, allow_nan=False)


@given(
    held=st.lists(st.tuples(TIMES, TIMES), max_size=3),
    rows=st.lists(
        st.builds(
            CommittedStep, st.integers(1, 4), st.integers(1, 30), TIMES, st.floats(0.0, 50.0)
        ),
        max_size=30,
    ),
    runs=st.lists(
        st.builds(AttemptRun, st.integers(1, 4), st.integers(0, 20), st.none() | st.integers(1, 4)),
        max_size=4,
    ),
    outages=st.lists(
        st.builds(
            Outage,
            TIMES,
            st.none() | TIMES,
            st.dictionaries(st.sampled_from(("detect", "fence", "form")), st.floats(0.0, 30.0)),
            st.integers(1, 4),
        ),
        max_size=4,
    ),
    ended=st.booleans(),
)
@settings(max_examples=300)
def test_kinds_sum_to_the_time_held_and_incidents_to_the_time_lost_for_any_clocks(
    held: list[tuple[float, float]],
    rows: list[CommittedStep],
    runs: list[AttemptRun],
    outages: list[Outage],
    ended: bool,
) -> None:
    stretches: list[tuple[float, float]] = []
    for since, until in sorted(tuple(sorted(interval)) for interval in held):
        begin = max(since, stretches[-1][1] if stretches else 0.0)
        stretches.append((begin, max(begin, until)))
    result = account(stretches, rows, runs, outages, ended=ended)
    microseconds = [round(seconds * 1e6) for seconds in result.by_kind_s.values()]
    assert sum(microseconds) == sum(round(b * 1e6) - round(a * 1e6) for a, b in stretches)
    assert all(each >= 0 for each in microseconds)
    assert result.steps + result.steps_replayed == (len(rows) if stretches else 0)
    assert set(TimeKind) <= set(result.by_kind_s)
    lost = [round(seconds * 1e6) for kind, seconds in result.by_kind_s.items() if is_lost(kind)]
    assert sum(round(seconds * 1e6) for seconds in result.lost_s.values()) == sum(lost)
    known = {run.incident for run in runs} | {outage.incident for outage in outages}
    assert set(result.lost_s) <= {None} | known
