"""Learns from the job how long a rank may show no sign of life before it is suspected. Pure.

For each phase, the longest standstill of each past occurrence is stored. The limit is a factor
times their 99.9th percentile (the longest, among fewer than a thousand), with a larger margin while
few are known, and never below a floor. The first steps of an attempt, which touch memory for the
first time and compile code, are learned separately.

The floor covers delays that no history shows: on a machine with more runnable processes than
processors, a process was measured to be scheduled some hundred milliseconds late, whatever its
history.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from math import ceil, inf

from holdfast_workers.spec import DetectionSpec

HISTORY_SIZE = 4096
"""Stored occurrences per phase. At 99.9% the four longest do not count, so one past delay does not
keep a limit high forever."""

QUANTILE = 0.999
FIRST_OCCURRENCES_MARGIN = 4.0
"""The extra margin after one occurrence, as a multiple of the limit; half of it after two."""

COLD_FLOORS = 5.0
"""The floor of first steps and of joining, as a multiple of the normal floor."""


class _History:
    """The newest standstills of one phase, in seconds."""

    def __init__(self) -> None:
        self._in_time: deque[float] = deque()
        self._in_order: list[float] = []

    def add(self, standstill_s: float) -> None:
        if len(self._in_time) == HISTORY_SIZE:
            del self._in_order[bisect_left(self._in_order, self._in_time.popleft())]
        self._in_time.append(standstill_s)
        insort(self._in_order, standstill_s)

    def __len__(self) -> int:
        return len(self._in_order)

    def high(self) -> float:
        return self._in_order[ceil(QUANTILE * len(self._in_order)) - 1]


class HangLimits:
    """The limits that one node learned for the phases of its ranks."""

    def __init__(self, spec: DetectionSpec) -> None:
        self._spec = spec
        self._known: dict[tuple[str, bool], _History] = {}

    def learn(self, phase: str, standstill_s: float, *, cold: bool) -> None:
        """An occurrence of `phase` has ended; `standstill_s` was its longest standstill."""
        self._known.setdefault((phase, cold), _History()).add(standstill_s)

    def limit_s(self, phase: str, *, cold: bool, bound_s: float = 0.0) -> float:
        """The longest allowed standstill in `phase`; `bound_s`, if not 0, is the declared bound."""
        spec = self._spec
        if bound_s or phase in spec.limits:
            return bound_s or spec.limits[phase]
        floor_s = spec.hang_floor_s * (COLD_FLOORS if cold else 1.0)
        history = self._known.get((phase, cold))
        if history is None:
            return max(floor_s, spec.first_limit_s)
        learned_s = spec.hang_factor * history.high()
        early_limit_s = learned_s * (1.0 + FIRST_OCCURRENCES_MARGIN / len(history))
        return max(floor_s, learned_s, min(early_limit_s, spec.first_limit_s))


class Standstill:
    """Measures how long one rank has shown no progress, in observed time; reports it once.

    A watcher that was itself delayed (a suspended or overloaded machine) counts at most `max_gap_s`
    of the time since its last observation, so unobserved time never makes a rank suspect.
    """

    def __init__(self, max_gap_s: float) -> None:
        self._max_gap_s = max_gap_s
        self._changed_at: float | None = None
        self._observed_at: float | None = None
        self._standstill_s = 0.0
        self._reported = False

    def observe(self, changed_at: float, limit_s: float, now: float) -> bool:
        """Whether a standstill has just passed its limit. `changed_at`: time of the last sign of
        life, by the clock of `now`."""
        since_s = now - (now if self._observed_at is None else self._observed_at)
        gap_s = min(since_s, self._max_gap_s)
        if changed_at != self._changed_at:
            self._changed_at, self._reported = changed_at, False
            self._standstill_s = min(gap_s, max(0.0, now - changed_at))
        else:
            self._standstill_s += gap_s
        self._observed_at = now
        if self._reported or self._standstill_s <= limit_s:
            return False
        self._reported = True
        return True

    def report_due_in_s(self, limit_s: float) -> float:
        """Seconds from the last observation until the standstill passes its limit, if it lasts;
        infinite once it is reported."""
        return inf if self._reported else max(0.0, limit_s - self._standstill_s)
