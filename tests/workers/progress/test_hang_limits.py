"""Limits follow from observed standstills: never below the floor, higher with little history."""

from __future__ import annotations

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from holdfast_workers.progress.hang_limits import COLD_FLOORS, HISTORY_SIZE, HangLimits, Standstill
from holdfast_workers.spec import DetectionSpec

TIMES = st.floats(0.0, 1000.0)
SPEC = DetectionSpec()


def learned(times: list[float], spec: DetectionSpec = SPEC, *, cold: bool = False) -> HangLimits:
    limits = HangLimits(spec)
    for standstill_s in times:
        limits.learn("forward", standstill_s, cold=cold)
    return limits


@given(st.lists(TIMES, max_size=50), st.booleans())
def test_no_learned_limit_is_below_the_floor(times: list[float], cold: bool) -> None:
    limit_s = learned(times, cold=cold).limit_s("forward", cold=cold)
    assert limit_s >= SPEC.hang_floor_s * (COLD_FLOORS if cold else 1.0)


@given(st.lists(TIMES, min_size=1, max_size=200))
def test_a_limit_exceeds_every_recent_standstill(times: list[float]) -> None:
    limit_s = learned(times).limit_s("forward", cold=False)
    assert limit_s >= SPEC.hang_factor * max(times)


@given(TIMES, st.integers(1, 300), st.integers(1, 300))
def test_the_margin_shrinks_with_more_history(standstill_s: float, few: int, more: int) -> None:
    few, more = sorted((few, few + more))
    early, late = (
        learned([standstill_s] * count).limit_s("forward", cold=False) for count in (few, more)
    )
    assert late <= early <= max(SPEC.first_limit_s, SPEC.hang_factor * standstill_s)


@given(st.lists(TIMES, max_size=20), st.lists(TIMES, max_size=20))
def test_first_steps_and_later_steps_are_learned_separately(
    cold: list[float], warm: list[float]
) -> None:
    both = learned(warm)
    for standstill_s in cold:
        both.learn("forward", standstill_s, cold=True)
    assert both.limit_s("forward", cold=False) == learned(warm).limit_s("forward", cold=False)
    alone = learned(cold, cold=True)
    assert both.limit_s("forward", cold=True) == alone.limit_s("forward", cold=True)


def test_a_phase_without_history_gets_the_first_limit() -> None:
    assert learned([0.01]).limit_s("evaluate", cold=False) == SPEC.first_limit_s


def test_one_delay_among_thousands_does_not_raise_the_limit() -> None:
    times = [0.5] * (HISTORY_SIZE - 1)
    assert learned([*times, 300.0]).limit_s("forward", cold=False) < 1.01


def test_old_slow_occurrences_are_forgotten() -> None:
    limits = learned([50.0] * 100 + [0.5] * HISTORY_SIZE)
    assert limits.limit_s("forward", cold=False) < 1.01


def test_a_job_that_has_become_slower_gets_longer_limits() -> None:
    limits = learned([0.5] * HISTORY_SIZE + [3.0] * 20)
    assert limits.limit_s("forward", cold=False) >= SPEC.hang_factor * 3.0


@given(st.lists(TIMES, max_size=20), st.floats(0.001, 1e5), st.booleans())
def test_a_declared_or_configured_limit_replaces_the_learned_one(
    times: list[float], bound_s: float, cold: bool
) -> None:
    limits = learned(times, DetectionSpec(limits={"forward": 7.0}), cold=cold)
    assert limits.limit_s("forward", cold=cold) == 7.0
    assert limits.limit_s("forward", cold=cold, bound_s=bound_s) == bound_s


OBSERVATIONS = st.lists(st.tuples(st.integers(0, 9), st.none() | st.integers(0, 9)), max_size=60)
"""The seconds since the last observation, and how long before this one a sign of life came."""


@given(OBSERVATIONS, st.integers(0, 40))
def test_a_standstill_is_reported_once_and_only_past_its_limit(
    observations: list[tuple[int, int | None]], limit_s: int
) -> None:
    standstill, now, max_gap_s = Standstill(5), 0, 5
    changed_at, standstill_s, reported = 0, 0, False
    standstill.observe(changed_at, limit_s, now)
    for waited_s, sign_ago_s in observations:
        now += waited_s
        gap_s = min(waited_s, max_gap_s)
        if sign_ago_s is not None and now - sign_ago_s > changed_at:
            changed_at, reported = now - sign_ago_s, False
            standstill_s = min(sign_ago_s, gap_s)
        else:
            standstill_s += gap_s
        reports = standstill.observe(changed_at, limit_s, now)
        assert not reports or (standstill_s > limit_s and not reported)
        reported = reported or reports
        assert reported or standstill_s <= limit_s


@given(OBSERVATIONS, st.floats(0.1, 40.0))
def test_an_observation_when_the_report_is_due_reports_at_once(
    observations: list[tuple[int, int | None]], limit_s: float
) -> None:
    standstill, now, changed_at = Standstill(20.0), 0.0, 0.0
    standstill.observe(changed_at, limit_s, now)
    for waited_s, sign_ago_s in observations:
        now += waited_s
        changed_at = max(changed_at, now - (waited_s if sign_ago_s is None else sign_ago_s))
        reported = standstill.observe(changed_at, limit_s, now)
        assert not reported or standstill.report_due_in_s(limit_s) == inf
    due_in_s = standstill.report_due_in_s(limit_s)
    if due_in_s < 20.0:
        assert not standstill.observe(changed_at, limit_s, now + 0.9 * due_in_s)
        assert standstill.observe(changed_at, limit_s, now + due_in_s + 1e-6)


def test_a_delayed_watcher_suspects_no_rank() -> None:
    standstill = Standstill(SPEC.hang_floor_s / 2)
    assert not standstill.observe(-0.3, SPEC.hang_floor_s, 0.0)
    assert not standstill.observe(0.1, SPEC.hang_floor_s, 0.4)
    assert not standstill.observe(0.1, SPEC.hang_floor_s, 3600.0)
