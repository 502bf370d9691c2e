"""Goodput: every moment of a job on the cluster is assigned to exactly one kind of time."""

from __future__ import annotations

from dataclasses import replace

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
    is_settled,
)
from holdfast_service.job_model.world_history import FormedWorld, WorldPeriod, world_periods

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
    assert result.lost_device_s == {7: 0.5 + 2.5 + 2.0}


def test_lost_time_is_attributed_to_its_incident() -> None:
    # Incident 1 goes back to step 3, incident 2 to step 1: steps 2 and 3 of attempt 1 are its loss.
    rows = [*steps(1, 1, 4, 1.0), *steps(2, 4, 5, 7.0), *steps(3, 2, 6, 11.0)]
    runs = [AttemptRun(1, 0), AttemptRun(2, 3, incident=1), AttemptRun(3, 1, incident=2)]
    outages = [Outage(4.5, 6.0, incident=1), Outage(8.25, 10.0, {"form": 1.0}, incident=2)]
    result = account([(0.0, 15.0)], rows, runs, outages, ended=True)
    assert result.lost_device_s == {1: 2.0 + 1.0, 2: 2.0 + 4.0}
    assert result.steps_replayed == 5


def test_lost_time_without_an_incident_is_attributed_to_none() -> None:
    rows = [*steps(1, 1, 3, 1.0), *steps(2, 2, 4, 6.0)]
    result = account([(0.0, 8.0)], rows, [AttemptRun(1, 0), AttemptRun(2, 1)], [], ended=True)
    assert result.lost_device_s == {None: 2.0 + 2.0}
    live = account(
        [(0.0, 6.0)], steps(1, 1, 3, 1.0), [AttemptRun(1, 0)], [Outage(4.0, None)], ended=False
    )
    assert sum(live.lost_device_s.values()) == 3.0


@pytest.mark.parametrize(
    ("first", "is_program", "kind"),
    [(4, False, "between_steps"), (9, False, "no_step"), (4, True, "no_step")],
)
def test_the_evaluation_of_the_first_step_after_a_fault_is_not_lost(
    first: int, is_program: bool, kind: str
) -> None:
    """The incident ends with the step, whose row follows when it is evaluated. With rows missing,
    nothing says what the ranks did."""
    rows = [*steps(1, 1, 3, 1.0), *steps(2, first, first + 3, 106.0)]
    runs, outage = [AttemptRun(1, 0), AttemptRun(2, 3, 7, 105.0)], Outage(4.0, 6.0, incident=7)
    result = account([(0.0, 109.0)], rows, runs, [outage], ended=True, is_program=is_program)
    assert spent(result) == {
        "productive": 7.0,
        "detection": 1.0,
        "recovery.other": 2.0,
        kind: 99.0,
    }
    assert result.lost_device_s == {7: 3.0}


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


def world(since: float, until: float, ranks: int) -> WorldPeriod:
    return WorldPeriod(since, until, {"dp_shard": ranks}, ranks)


def test_each_moment_counts_at_the_world_size_of_that_moment() -> None:
    # 8 ranks make 4 steps; a node is lost at 5.0; 6 ranks form at 6.0 and make 6 steps.
    rows = [*steps(1, 1, 4, 2.0), *steps(2, 5, 10, 8.0)]
    outage = Outage(5.5, 8.0, {"fence": 0.5, "form": 1.0}, incident=1)
    result = account(
        [(0.0, 13.0)],
        rows,
        [AttemptRun(1, 0), AttemptRun(2, 4, incident=1)],
        [outage],
        ended=True,
        worlds=[world(0.0, 6.0, 8), world(6.0, 13.0, 6)],
    )
    by_kind = {kind: amount for kind, amount in result.by_kind_device_s.items() if amount}
    assert by_kind == {
        "starting": 8.0,
        "productive": 4 * 8.0 + 6 * 6.0,
        "detection": 0.5 * 8,
        "recovery.fence": 0.5 * 8,
        "recovery.form": 1.0 * 6,
    }
    assert result.held_device_s == 6 * 8.0 + 7 * 6.0
    assert result.goodput == pytest.approx(68 / 90)
    assert result.lost_device_s == {1: 4.0 + 4.0 + 6.0}
    assert (result.held_s, result.devices) == (13.0, 6)


def test_a_stay_on_the_cluster_counts_at_its_first_world_from_its_begin() -> None:
    formed = [
        FormedWorld(3.0, {"dp_shard": 4}, 4),
        FormedWorld(5.0, {"dp_shard": 4}, 4),
        FormedWorld(22.0, {"dp_shard": 2}, 2),
    ]
    periods = world_periods(formed, [(0.0, 8.0), (20.0, 30.0), (40.0, 41.0)])
    assert periods == (world(0.0, 8.0, 4), world(20.0, 30.0, 2))


TIMES = st.floats(0.0, 1000.0, allow_nan=False)


HELD = st.lists(st.tuples(TIMES, TIMES), max_size=3)
ROWS = st.lists(
    st.builds(CommittedStep, st.integers(1, 4), st.integers(1, 30), TIMES, st.floats(0.0, 50.0)),
    max_size=30,
)
RUNS = st.lists(
    st.builds(AttemptRun, st.integers(1, 4), st.integers(0, 20), st.none() | st.integers(1, 4)),
    max_size=4,
)
OUTAGES = st.lists(
    st.builds(
        Outage,
        TIMES,
        st.none() | TIMES,
        st.dictionaries(st.sampled_from(("detect", "fence", "form")), st.floats(0.0, 30.0)),
        st.integers(1, 4),
    ),
    max_size=4,
)
CHANGES = st.lists(st.tuples(TIMES, st.integers(1, 64)), max_size=6)


def in_order(held: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The intervals without overlaps."""
    stretches: list[tuple[float, float]] = []
    for since, until in sorted(tuple(sorted(interval)) for interval in held):
        begin = max(since, stretches[-1][1] if stretches else 0.0)
        stretches.append((begin, max(begin, until)))
    return stretches


def formed_worlds(changes: list[tuple[float, int]]) -> list[FormedWorld]:
    return [FormedWorld(at, {"dp_shard": size}, size) for at, size in sorted(changes)]


@given(held=HELD, rows=ROWS, runs=RUNS, outages=OUTAGES, ended=st.booleans())
@settings(max_examples=300)
def test_kinds_sum_to_the_time_held_and_incidents_to_the_time_lost_for_any_clocks(
    held: list[tuple[float, float]],
    rows: list[CommittedStep],
    runs: list[AttemptRun],
    outages: list[Outage],
    ended: bool,
) -> None:
    stretches = in_order(held)
    result = account(stretches, rows, runs, outages, ended=ended)
    microseconds = [round(seconds * 1e6) for seconds in result.by_kind_s.values()]
    assert sum(microseconds) == sum(round(b * 1e6) - round(a * 1e6) for a, b in stretches)
    assert all(each >= 0 for each in microseconds)
    assert result.steps + result.steps_replayed == (len(rows) if stretches else 0)
    assert set(TimeKind) <= set(result.by_kind_s)
    lost = [round(seconds * 1e6) for kind, seconds in result.by_kind_s.items() if is_lost(kind)]
    assert sum(round(seconds * 1e6) for seconds in result.lost_device_s.values()) == sum(lost)
    known = {run.incident for run in runs} | {outage.incident for outage in outages}
    assert set(result.lost_device_s) <= {None} | known


@given(HELD, ROWS, RUNS, OUTAGES, st.booleans())
@settings(max_examples=200)
def test_no_time_after_the_last_incident_is_lost_but_to_steps_and_to_a_lack_of_incidents(
    held: list[tuple[float, float]],
    rows: list[CommittedStep],
    runs: list[AttemptRun],
    outages: list[Outage],
    ended: bool,
) -> None:
    closed = [outage for outage in outages if outage.closed_at is not None]
    result = account(in_order(held), rows, runs, closed, ended=ended)
    ends = [
        max(outage.signalled_at, outage.closed_at or 0.0)
        for outage in sorted(closed, key=lambda outage: outage.signalled_at)
    ]
    for span in result.spans:
        if span.kind.startswith("recovery.") and span.until > max(ends, default=0.0) + 1e-6:
            assert span.incident is None, "a recovery outlasts every incident"


@given(HELD, ROWS, RUNS, OUTAGES, st.booleans(), st.integers(1, 4096))
@settings(max_examples=200)
def test_a_job_of_one_size_has_the_ratios_of_its_times(
    held: list[tuple[float, float]],
    rows: list[CommittedStep],
    runs: list[AttemptRun],
    outages: list[Outage],
    ended: bool,
    size: int,
) -> None:
    stretches = in_order(held)
    formed = [FormedWorld(since, {"dp_shard": size}, size) for since, _ in stretches]
    periods = world_periods(formed, stretches)
    result = account(stretches, rows, runs, outages, ended=ended, worlds=periods, devices=size)
    assert result.held_device_s == pytest.approx(result.held_s * size)
    for kind, seconds in result.by_kind_s.items():
        assert result.by_kind_device_s[kind] == pytest.approx(seconds * size)
    by_time = account(stretches, rows, runs, outages, ended=ended)
    assert result.goodput == (None if by_time.goodput is None else pytest.approx(by_time.goodput))
    assert (by_time.spans, by_time.by_kind_s) == (result.spans, result.by_kind_s)


@given(HELD, ROWS, RUNS, OUTAGES, CHANGES, st.booleans())
@settings(max_examples=200)
def test_device_seconds_sum_over_kinds_and_incidents_for_any_sizes(
    held: list[tuple[float, float]],
    rows: list[CommittedStep],
    runs: list[AttemptRun],
    outages: list[Outage],
    changes: list[tuple[float, int]],
    ended: bool,
) -> None:
    stretches = in_order(held)
    periods = world_periods(formed_worlds(changes), stretches)
    result = account(stretches, rows, runs, outages, ended=ended, worlds=periods, devices=3)
    covered = sum((_us(p.until) - _us(p.since)) * p.world_size for p in periods)
    bare = sum(_us(b) - _us(a) for a, b in stretches) - sum(
        _us(p.until) - _us(p.since) for p in periods
    )
    assert sum(map(_us, result.by_kind_device_s.values())) == covered + bare * 3
    lost = [_us(amount) for kind, amount in result.by_kind_device_s.items() if is_lost(kind)]
    assert sum(map(_us, result.lost_device_s.values())) == sum(lost)
    assert result.goodput is None or 0 <= result.goodput <= 1


@given(HELD, ROWS, RUNS, OUTAGES, CHANGES, st.lists(TIMES, max_size=5))
@settings(max_examples=200)
def test_a_period_that_is_split_changes_nothing(
    held: list[tuple[float, float]],
    rows: list[CommittedStep],
    runs: list[AttemptRun],
    outages: list[Outage],
    changes: list[tuple[float, int]],
    cuts: list[float],
) -> None:
    stretches = in_order(held)
    periods = list(world_periods(formed_worlds(changes), stretches))
    split: list[WorldPeriod] = []
    for period in periods:
        ends = [cut for cut in sorted(cuts) if period.since < cut < period.until]
        for since, until in zip([period.since, *ends], [*ends, period.until], strict=True):
            split.append(replace(period, since=since, until=until))
    whole, parts = (
        account(stretches, rows, runs, outages, ended=True, worlds=worlds)
        for worlds in (periods, split)
    )
    assert whole == parts


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


@given(st.floats(0.0, 1e6), st.just(0.0) | st.floats(1e-3, 1e6), st.floats(0.0, 1e6))
def test_a_start_alone_makes_no_settled_goodput_low(
    starting_s: float, productive_s: float, lost_s: float
) -> None:
    held_s = starting_s + productive_s
    if held_s and is_settled(productive_s / held_s, productive_s, starting_s):
        assert productive_s / held_s >= 0.9 - 1e-9
    with_losses_s = held_s + lost_s
    if productive_s > 1.0 and with_losses_s > 61.0 + 10.1 * starting_s:
        assert is_settled(productive_s / with_losses_s, productive_s, starting_s)


def test_the_goodput_of_a_job_without_steps_is_not_settled() -> None:
    assert not is_settled(0.0, 0.0, 0.0)
