"""Metrics from the lines that a program prints, by the regular expression of its spec.

No I/O. A line never ends a program's run: text that is no number is left out. A line is searched up
to a limit of characters and of time, and a pattern that takes long all the same is given up. The
standard library has no limit for a search, which can take hours; but it lets signals through.
"""

from __future__ import annotations

import math
import re
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

from holdfast_workers.program_metrics.metric_names import NAME, RESERVED_NAMES, OwnMetrics
from holdfast_workers.protocol.programs import ProgramStep

MOST_CHARACTERS = 300
"""Characters of a line that are searched; the rest is not."""
MOST_SLOW_S = 1.0
"""Time that all slow searches of an attempt may take together, in seconds of the processor."""
MOST_SEARCH_S = 0.25
"""Time that one search may take: the launcher does nothing else meanwhile."""
MOST_REPEATS = 4
"""Repeats without a limit that match spaces: each may multiply the time of a search."""
SLOW_S = 0.05
STEP = "step"
NAMED = ("loss", "grad_norm", "lr")
TOKENS = "tokens"
_ALLOWED = frozenset({STEP, TOKENS, *NAMED})
_LARGEST = 2.0**53
_UNLIMITED = re.compile(r"[*+]|\{\d*,\}")
Result = TypeVar("Result")


def pattern_fault(pattern: str) -> str | None:
    """The fault of a `program.metrics` and its remedy, or None."""
    try:
        names = re.compile(pattern).groupindex
    except (re.error, RecursionError, OverflowError) as error:
        return f"it is not a regular expression of Python: {error}"
    if not names:
        return "it has no named group: write (?P<loss>[-+.e0-9]+) for each number"
    for name in names:
        if name not in _ALLOWED and (name in RESERVED_NAMES or not NAME.fullmatch(name)):
            return f"a group cannot be called {name!r}: choose another name"
    if _repeats_a_choice(pattern):
        return (
            "a repeated group contains a repetition or alternatives, such as (a+)+ or (a|b)*, "
            "which can take hours to search a line: write the group out, or a set such as [ab]*"
        )
    if (repeats := _wide_repeats(pattern)) > MOST_REPEATS:
        return (
            f"it has {repeats} repeats such as .* or [^,]+, which take long together: write at "
            rf"most {MOST_REPEATS}, \S+ for a .+ that is a number, and nothing for a .* at its ends"
        )
    return None


class MetricLines:
    """Reads the lines of one rank in one attempt."""

    def __init__(self, pattern: str, clock: Callable[[], float] = time.process_time) -> None:
        """`pattern`: without a `pattern_fault`."""
        self.problem = ""
        """Why no more lines are searched, for the job's log; "" while they are."""
        self._pattern = re.compile(pattern)
        self._clock = clock
        self._slow_s = 0.0
        self._own = OwnMetrics()
        self._steps = StepNumbers()
        self._last_at: float | None = None

    def read(self, text: str, at: float, *, is_state: bool = False) -> ProgramStep | None:
        """The step that the line reports; None: it reports none, or the same step again.

        `is_state`: the line is a state of a progress bar, which is drawn as often as it likes: it
        reports a step only by the step's number.

        `at`: Unix seconds at which the line was printed. The step's time is the whole time since
        the step before that was reported, also if there are others between; 0 for the first.
        """
        found = None if self.problem else self._search(text)
        if found is None:
            return None
        numbers = {
            name: value
            for name, given in found.groupdict().items()
            if given is not None and (value := number(given)) is not None
        }
        if not numbers or (is_state and STEP not in numbers):
            return None
        step = self._steps.number(numbers.pop(STEP, None))
        if step is None:
            return None
        elapsed_s = 0.0 if self._last_at is None else max(0.0, at - self._last_at)
        self._last_at = at
        named = {name: numbers.pop(name, None) for name in NAMED}
        return ProgramStep(
            step=step,
            at=at,
            step_time_s=elapsed_s,
            **named,
            tokens=int(min(max(0.0, numbers.pop(TOKENS, 0.0)), _LARGEST)),
            own=self._own.storable(numbers),
        )

    def _search(self, text: str) -> re.Match[str] | None:
        began = self._clock()
        try:
            found = call_within(lambda: self._pattern.search(text[:MOST_CHARACTERS]), MOST_SEARCH_S)
        except TookTooLong:
            found = None
        took_s = self._clock() - began
        self._slow_s += took_s if took_s > SLOW_S else 0.0
        if self._slow_s > MOST_SLOW_S:
            self.problem = (
                f"program.metrics takes {took_s:.2f} s to search a line: no more lines are "
                "searched; write the pattern with fewer .* parts"
            )
        return found


class StepNumbers:
    """Numbers the steps of a program by the numbers that it reports."""

    def __init__(self) -> None:
        self.last = 0
        self._base = 0
        """Steps before a counter that starts again with every epoch did so last."""
        self._shown: int | None = None
        self._least = 0
        """The number with which the counter begins: 0 if that was shown first, otherwise 1."""

    def number(self, shown: float | None) -> int | None:
        """The steps applied, growing from call to call; None: no new step. `shown`: the number
        that the program reports; None: it reports none, and one more step is applied."""
        given = (self._shown or 0) + 1.0 if shown is None else shown
        if not self._least <= given < _LARGEST or not given.is_integer() or given == self._shown:
            return None
        step = int(given)
        if self._shown is None:
            self._least = min(step, 1)
        elif step < self._shown:
            self._base = self.last + 1 - self._least
        self._shown, self.last = step, self._base + step
        return self.last


def number(text: str) -> float | None:
    """`1,234.5`, `3e-4`, `12%`; None: no number, or not finite."""
    plain = text.strip().rstrip("%").replace(",", "").replace("_", "")
    try:
        value = float(plain)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _repeats_a_choice(pattern: str) -> bool:
    """Whether a group is repeated without a limit that can match a text in more than one way."""
    groups = [False]
    """For each open group, whether it contains a repetition without a limit, or alternatives."""
    previous = False
    """Whether the item before this character is such a group."""
    at = 0
    while at < len(pattern):
        character, item = pattern[at], False
        if character == "\\":
            at += 1
        elif character == "[":
            at = _end_of_set(pattern, at)
        elif character == "(":
            groups.append(False)
            at += pattern.startswith("(?", at)
        elif character == ")" and len(groups) > 1:
            item = groups.pop()
            groups[-1] |= item
        elif character == "|":
            groups[-1] = True
        elif _UNLIMITED.match(pattern, at):
            if previous:
                return True
            groups[-1] = True
        previous = item
        at += 1
    return False


def _wide_repeats(pattern: str) -> int:
    """The number of sets that contain the space and are repeated without a limit."""
    repeats, at = 0, 0
    while at < len(pattern):
        start = at
        if pattern[at] == "[":
            at = _end_of_set(pattern, at)
        elif pattern[at] == "\\":
            at += 1
        at += 1
        item = pattern[start:at]
        is_set = item == "." or item[0] in "[\\"
        if is_set and _UNLIMITED.match(pattern, at) and _matches_a_space(item):
            repeats += 1
    return repeats


def _matches_a_space(item: str) -> bool:
    r"""Whether `.`, a set or an escape matches a space; False for an escape that has no meaning by
    itself, such as `\1`."""
    try:
        return re.fullmatch(item, " ") is not None
    except re.error:
        return False


def _end_of_set(pattern: str, start: int) -> int:
    """The index of the `]` that ends the set of characters that begins at `start`."""
    at = start + 1
    if pattern.startswith("^", at):
        at += 1
    at += 1  # a `]` in the first place is a member
    while at < len(pattern) and pattern[at] != "]":
        at += 2 if pattern[at] == "\\" else 1
    return at


class TookTooLong(Exception):
    """The computation was ended."""


def call_within(compute: Callable[[], Result], limit_s: float) -> Result:
    """The result of `compute`, which has no effects and may take `limit_s` of the processor. In
    another thread than the main one, there is no limit. Raises TookTooLong."""
    if threading.current_thread() is not threading.main_thread():
        return compute()
    is_computing = True

    def end(_number: int, _frame: FrameType | None) -> None:
        if is_computing:
            raise TookTooLong(f"it took more than {limit_s:g} s of the processor")

    before = signal.signal(signal.SIGVTALRM, end)
    try:
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, limit_s)
            return compute()
        finally:
            is_computing = False
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
    finally:
        signal.signal(signal.SIGVTALRM, before)
