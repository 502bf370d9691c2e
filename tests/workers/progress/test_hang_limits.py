"""Limits follow from observed standstills: never below the floor, higher with little history."""

from __future__ import annotations

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


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), max_size=60), st.integers(0, 40))
def test_a_standstill_is_reported_once_and_only_past_its_limit(
    observations: list[tuple[int, int]], limit_s: int
) -> None:
    standstill, now, max_gap_s = Standstill(5), 0, 5
    seen, standstill_s, reported = None, 0, False
    for mark, waited_s in observations:
        now += waited_s
        if mark != seen:
            seen, standstill_s, reported = mark, 0, False
        else:
            standstill_s += min(waited_s, max_gap_s)
        reports = standstill.observe(mark, limit_s, now)
        assert not reports or (standstill_s > limit_s and not reported)
        reported = reported or reports
        assert reported or standstill_s <= limit_s


def test_a_delayed_watcher_suspects_no_rank() -> None:
    standstill = Standstill(0.2)
    assert not standstill.observe("same", 1.0, 0.0)
    assert not standstill.observe("same", 1.0, 3600.0)
