"""Limits follow from what was seen: never under the floor, patient while little is known."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast_workers.progress.hang_limits import COLD_FLOORS, REMEMBERED, Limits, Standstill
from holdfast_workers.spec import DetectionSpec

TIMES = st.floats(0.0, 1000.0)
SPEC = DetectionSpec()


def learned(times: list[float], spec: DetectionSpec = SPEC, *, cold: bool = False) -> Limits:
    limits = Limits(spec)
    for stood_s in times:
        limits.learn("forward", stood_s, cold=cold)
    return limits


@given(st.lists(TIMES, max_size=50), st.booleans())
def test_no_learned_limit_is_under_the_floor(times: list[float], cold: bool) -> None:
    limit_s = learned(times, cold=cold).limit_s("forward", cold=cold)
    assert limit_s >= SPEC.hang_floor_s * (COLD_FLOORS if cold else 1.0)


@given(st.lists(TIMES, min_size=1, max_size=200))
def test_a_limit_leaves_room_over_all_that_was_seen_lately(times: list[float]) -> None:
    limit_s = learned(times).limit_s("forward", cold=False)
    assert limit_s >= SPEC.hang_factor * max(times)


@given(TIMES, st.integers(1, 300), st.integers(1, 300))
def test_patience_shrinks_as_more_is_known(stood_s: float, few: int, more: int) -> None:
    few, more = sorted((few, few + more))
    early, late = (
        learned([stood_s] * count).limit_s("forward", cold=False) for count in (few, more)
    )
    assert late <= early <= max(SPEC.first_limit_s, SPEC.hang_factor * stood_s)


@given(st.lists(TIMES, max_size=20), st.lists(TIMES, max_size=20))
def test_first_steps_and_later_ones_are_learned_apart(cold: list[float], warm: list[float]) -> None:
    both = learned(warm)
    for stood_s in cold:
        both.learn("forward", stood_s, cold=True)
    assert both.limit_s("forward", cold=False) == learned(warm).limit_s("forward", cold=False)
    alone = learned(cold, cold=True)
    assert both.limit_s("forward", cold=True) == alone.limit_s("forward", cold=True)


def test_what_is_not_known_gets_the_first_limit() -> None:
    assert learned([0.01]).limit_s("evaluate", cold=False) == SPEC.first_limit_s


def test_a_hiccup_among_thousands_does_not_make_the_limit_lax() -> None:
    times = [0.5] * (REMEMBERED - 1)
    assert learned([*times, 300.0]).limit_s("forward", cold=False) < 1.01


def test_what_was_slow_long_ago_is_forgotten() -> None:
    limits = learned([50.0] * 100 + [0.5] * REMEMBERED)
    assert limits.limit_s("forward", cold=False) < 1.01


def test_a_job_that_has_become_slower_gets_longer_limits() -> None:
    limits = learned([0.5] * REMEMBERED + [3.0] * 20)
    assert limits.limit_s("forward", cold=False) >= SPEC.hang_factor * 3.0


@given(st.lists(TIMES, max_size=20), st.floats(0.001, 1e5), st.booleans())
def test_what_is_declared_or_set_holds_instead_of_what_is_learned(
    times: list[float], bound_s: float, cold: bool
) -> None:
    limits = learned(times, DetectionSpec(limits={"forward": 7.0}), cold=cold)
    assert limits.limit_s("forward", cold=cold) == 7.0
    assert limits.limit_s("forward", cold=cold, bound_s=bound_s) == bound_s


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), max_size=60), st.integers(0, 40))
def test_a_standstill_is_told_once_and_only_past_its_limit(
    looks: list[tuple[int, int]], limit_s: int
) -> None:
    standstill, now, most_s = Standstill(5), 0, 5
    seen, stood_s, told = None, 0, False
    for mark, waited_s in looks:
        now += waited_s
        if mark != seen:
            seen, stood_s, told = mark, 0, False
        else:
            stood_s += min(waited_s, most_s)
        says = standstill.look(mark, limit_s, now)
        assert not says or (stood_s > limit_s and not told)
        told = told or says
        assert told or stood_s <= limit_s


def test_a_watch_that_was_held_up_accuses_nobody_of_its_own_delay() -> None:
    standstill = Standstill(0.2)
    assert not standstill.look("same", 1.0, 0.0)
    assert not standstill.look("same", 1.0, 3600.0)
