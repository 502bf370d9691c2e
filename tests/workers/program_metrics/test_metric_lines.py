"""Metrics from printed lines: numbers, steps, refused patterns, and the limit of a search."""

from __future__ import annotations

import math
import re
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_workers.program_metrics import metric_lines
from holdfast_workers.program_metrics.metric_lines import (
    MetricLines,
    StepNumbers,
    TookTooLong,
    call_within,
    number,
    pattern_fault,
)
from holdfast_workers.program_metrics.metric_names import MAX_NAMES, OwnMetrics

STEP_AND_LOSS = r"step (?P<step>[0-9,]+) .*loss (?P<loss>\S+)"
LIMIT_S = 0.1


def test_a_line_of_every_known_name_is_a_step() -> None:
    lines = MetricLines(
        r"(?P<step>\S+) (?P<loss>\S+) (?P<grad_norm>\S+) (?P<lr>\S+) (?P<tokens>\S+) (?P<acc>\S+)"
    )
    found = lines.read("1,200 2.5e0 -.25 3E-4 4,096 87.5%", at=10.0)
    assert found is not None
    assert (found.step, found.loss, found.grad_norm, found.lr) == (1200, 2.5, -0.25, 3e-4)
    assert (found.tokens, found.own, found.at, found.step_time_s) == (4096, {"acc": 87.5}, 10, 0)


def test_the_time_of_a_step_is_that_since_the_line_before() -> None:
    lines = MetricLines(STEP_AND_LOSS)
    lines.read("step 10 loss 3", at=100.0)
    found = lines.read("step 20 loss 2", at=105.0)
    assert found is not None and found.step_time_s == 5.0
    found = lines.read("step 21 loss 2", at=104.0)  # the clock was set back
    assert found is not None and found.step_time_s == 0.0


def test_other_lines_and_text_that_is_no_number_are_no_step() -> None:
    lines = MetricLines(r"loss (?P<loss>\S+)")
    assert [lines.read(text, 0.0) for text in ("", "hello", "loss high", "loss nan")] == [None] * 4
    found = lines.read("loss 1", 0.0)
    assert found is not None and found.step == 1


def test_a_loss_that_is_not_finite_is_left_out_of_its_step() -> None:
    found = MetricLines(STEP_AND_LOSS).read("step 3 loss inf", 0.0)
    assert found is not None and (found.step, found.loss) == (3, None)


def test_lines_without_a_step_are_counted() -> None:
    lines = MetricLines(r"(?:step (?P<step>\d+) )?loss (?P<loss>\S+)")
    texts = ["loss 3", "loss 2", "step 7 loss 2", "loss 1"]
    assert [found.step for text in texts if (found := lines.read(text, 0.0))] == [1, 2, 7, 8]


def test_a_counter_that_starts_again_with_an_epoch_goes_on() -> None:
    steps = StepNumbers()
    shown: list[float] = [10.0, 20.0, 20.0, 30.0, 10.0, 20.0, 0.0, 0.5, -3.0, 30.0]
    assert [steps.number(each) for each in shown] == [
        10,
        20,
        None,
        30,
        40,
        50,
        None,
        None,
        None,
        60,
    ]


def test_a_counter_may_begin_with_0() -> None:
    steps = StepNumbers()
    shown = [0.0, 1.0, 2.0, 0.0, 0.0, 1.0]
    assert [steps.number(each) for each in shown] == [0, 1, 2, 3, None, 4]


@given(st.lists(st.none() | st.floats(allow_nan=False) | st.integers(-5, 10**6).map(float)))
def test_steps_never_go_back(shown: list[float | None]) -> None:
    steps = StepNumbers()
    found = [step for each in shown if (step := steps.number(each)) is not None]
    assert all(before < after for before, after in zip([-1, *found], found, strict=False))


@given(st.text(max_size=60), st.floats(0, 1e9))
def test_no_line_ends_the_reading(text: str, at: float) -> None:
    lines = MetricLines(r"(?P<step>\S*)\s?(?P<loss>\S*) ?(?P<tokens>\S*) ?(?P<other>\S*)")
    for line in (text, f"{text} {text}", f"1 {text} {text} {text}"):
        found = lines.read(line, at)
        if found is not None:
            values = (found.loss or 0.0, float(found.tokens), *found.own.values())
            assert found.step >= 1 and all(map(math.isfinite, values))


@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(10**15), 10**15))
def test_numbers_are_read_as_they_are_printed(value: float) -> None:
    forms = [f"{value!r}", f" {value!r}% ", f"{value:,}"]
    assert [number(form) for form in forms] == [float(value)] * 3


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        ("loss (", "not a regular expression"),
        ("loss [0-9]+", "no named group"),
        ("(?P<attempt>x)", "cannot be called 'attempt'"),
        ("(?P<_x>x)", "cannot be called '_x'"),
        (r"(?P<loss>(?:\d+)+)x", "can take hours"),
        (r"(?P<loss>(?:a|aa)*)x", "can take hours"),
        (r"(?P<loss>(?:(?:a{2,}))*)x", "can take hours"),
        (r".*epoch.*step.*loss.*lr.* (?P<lr>\S+)", "5 repeats such as .*"),
        (r"[^,]*a\W+b\s+c\D{2,}d.+ (?P<lr>\S+)", "write at most 4"),
        ("(?P<loss>" + "x{60000}" * 9 + "{99999999999999999999})", "not a regular expression"),
    ],
)
def test_a_bad_pattern_is_refused_with_its_reason(pattern: str, told: str) -> None:
    assert told in (pattern_fault(pattern) or "")


@pytest.mark.parametrize(
    "pattern",
    [
        r"step (?P<step>[0-9]+) loss (?P<loss>[-+.e0-9]+)",
        r"\((?P<loss>[)+*|]+)\)+ (?:it|step)? (?P<step>\d+)",
        r"[]+)]*(?P<acc>\d{1,3})(?:,\d)?",
        r"(?P<step>\d+) (?P<loss>\S+) (?P<grad_norm>\S+) (?P<lr>\S+) (?P<tokens>[\d,]+) (?P<a>\w+)",
        r"step (?P<step>\d+).*loss (?P<loss>\S+).*norm (?P<grad_norm>\S+).*lr (?P<lr>\S+)",
        r"\.*\.*\.*\.*\.*\*[.]+ (?P<loss>\d)",
    ],
)
def test_usual_patterns_are_accepted(pattern: str) -> None:
    assert re.compile(pattern) and pattern_fault(pattern) is None


@pytest.mark.seconds
@pytest.mark.parametrize(
    "pattern",
    [r".*a.*a.*a.*(?P<loss>x)", r"\S+\S+\S+\S+(?P<loss>x)", r"(?:a?){99}(?P<loss>a{99})x"],
)
def test_the_slowest_patterns_are_given_up(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pattern_fault(pattern) is None
    limits_s, call = [], metric_lines.call_within

    def recorded(body: Callable[[], Any], limit_s: float) -> Any:
        limits_s.append(limit_s)
        return call(body, limit_s)

    monkeypatch.setattr(metric_lines, "call_within", recorded)
    lines = MetricLines(pattern)
    while not lines.problem:
        assert lines.read("a" * 100_000, 0.0) is None
    assert 0 < max(limits_s) < 1.0, "the launcher does nothing else meanwhile"
    assert "no more lines are searched" in lines.problem
    assert lines.read("aaax", 0.0) is None


def test_a_pattern_of_many_names_is_quick_in_a_line_that_repeats_them() -> None:
    lines = MetricLines(r".*epoch.*step.*loss.*lr (?P<lr>\S+) end")
    assert lines.read("epoch step loss lr " * 50, 0.0) is None
    assert not lines.problem


def test_the_end_of_a_long_line_is_not_searched() -> None:
    assert MetricLines(r"loss (?P<loss>\S+)").read("-" * 300 + "loss 1", 0.0) is None


def test_the_states_of_a_progress_bar_are_steps_if_they_are_numbered() -> None:
    lines = MetricLines(r"(?:(?P<step>\d+)/9 .*)?loss=(?P<loss>\d)")
    bar = [" 11%|# | 1/9 [loss=5]", " 22%|## | 2/9 [loss=4]", " 22%|## | 2/9 [loss=4]", "loss=3"]
    found = [lines.read(state, 0.0, is_state=True) for state in bar]
    assert [step and (step.step, step.loss) for step in found] == [(1, 5.0), (2, 4.0), None, None]


def test_a_metric_may_stand_behind_a_progress_bar() -> None:
    found = MetricLines(STEP_AND_LOSS).read(" 50%|#####     | 5/10 step 5 , loss 3", 0.0)
    assert found is not None and (found.step, found.loss) == (5, 3.0)


def test_own_metrics_have_valid_names_and_a_limited_number() -> None:
    own = OwnMetrics()
    assert own.storable({"acc": 1, "samples": 1, "9x": 1, "a b": 1, "x": math.nan}) == {"acc": 1}
    many = {f"m{n}": 1.0 for n in range(MAX_NAMES)}
    assert len(own.storable(many)) == MAX_NAMES - 1
    assert own.storable({"acc": 2, "another": 2}) == {"acc": 2}


@pytest.mark.parametrize(
    "pattern",
    [
        r".*.*.*.*(?P<loss>\d)$",
        r"\S+\S+\S+\S+(?P<lr>x)",
        r".*?.*?.*?.*?(?P<lr>\S) end",
        r"(?P<lr>x)?a{0,99}a{0,99}a{0,99}a{0,99}z",
        r"(?:a{1,90}){1,90}(?P<lr>x)",
    ],
)
def test_a_search_of_hours_ends_at_its_limit(pattern: str) -> None:
    before = signal.getsignal(signal.SIGVTALRM)
    with pytest.raises(TookTooLong, match=r"more than 0\.1 s"):
        call_within(lambda: re.compile(pattern).search("a" * 300), LIMIT_S)
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGVTALRM) == before


def test_results_and_errors_pass_and_no_timer_stays() -> None:
    assert call_within(lambda: 7, LIMIT_S) == 7
    with pytest.raises(ZeroDivisionError):
        call_within(lambda: 1 / 0, LIMIT_S)
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


def test_another_thread_has_no_limit() -> None:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(call_within(lambda: 7, LIMIT_S)))
    thread.start()
    thread.join(60)
    assert found == [7]
