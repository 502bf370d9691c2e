"""How long a rank may give no sign of life before it is suspected, learned from the job; pure.

For each phase the longest standstills of its past occurrences are remembered. The limit is a factor
over their 99.9th percentile (their longest, among fewer than a thousand), with more patience while
few are known, and never under a floor. What happens in the first steps of an attempt, where memory
is touched for the first time and code is compiled, is learned apart.

The floor is for what no history tells: on a machine with more to do than processors a process gets
its turn late, by some hundred milliseconds in what was measured, whatever it has done so far.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from math import ceil

from holdfast_workers.spec import DetectionSpec

REMEMBERED = 4096
"""Occurrences of a phase: with 99.9% the four longest of them do not count, so that a hiccup of the
past does not make a limit lax for ever."""

QUANTILE = 0.999
GRACE = 4.0
"""So many times the limit there is more patience after one occurrence; half of that after two."""

COLD_FLOORS = 5.0
"""The floor of first steps and of joining, in floors."""


class _History:
    """The newest standstills of one kind, in seconds."""

    def __init__(self) -> None:
        self._in_time: deque[float] = deque()
        self._in_order: list[float] = []

    def add(self, stood_s: float) -> None:
        if len(self._in_time) == REMEMBERED:
            del self._in_order[bisect_left(self._in_order, self._in_time.popleft())]
        self._in_time.append(stood_s)
        insort(self._in_order, stood_s)

    def __len__(self) -> int:
        return len(self._in_order)

    def high(self) -> float:
        return self._in_order[ceil(QUANTILE * len(self._in_order)) - 1]


class Limits:
    """What one node knows of the phases of its ranks."""

    def __init__(self, spec: DetectionSpec) -> None:
        self._spec = spec
        self._known: dict[tuple[str, bool], _History] = {}

    def learn(self, phase: str, stood_s: float, *, cold: bool) -> None:
        """An occurrence of `phase` has ended; `stood_s` was its longest standstill."""
        self._known.setdefault((phase, cold), _History()).add(stood_s)

    def limit_s(self, phase: str, *, cold: bool, bound_s: float = 0.0) -> float:
        """How long a standstill in `phase` may be. `bound_s`, if not 0, is what was declared."""
        spec = self._spec
        if bound_s or phase in spec.limits:
            return bound_s or spec.limits[phase]
        floor_s = spec.hang_floor_s * (COLD_FLOORS if cold else 1.0)
        history = self._known.get((phase, cold))
        if history is None:
            return max(floor_s, spec.first_limit_s)
        learned_s = spec.hang_factor * history.high()
        patient_s = learned_s * (1.0 + GRACE / len(history))
        return max(floor_s, learned_s, min(patient_s, spec.first_limit_s))


class Standstill:
    """How long one rank has shown nothing new, in time that was really watched; tells it once.

    A watcher that was itself held up (a machine that was suspended, or has too much to do) counts
    only `most_s` of the time since it last looked: nobody is accused for what it has not seen.
    """

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._seen: object = None
        self._looked_at = 0.0
        self._stood_s = 0.0
        self._told = False

    def look(self, seen: object, limit_s: float, now: float) -> bool:
        """Whether a standstill has just passed its limit. `seen` is equal as long as it lasts."""
        if seen != self._seen:
            self._seen, self._stood_s, self._told = seen, 0.0, False
        else:
            self._stood_s += min(now - self._looked_at, self._most_s)
        self._looked_at = now
        if self._told or self._stood_s <= limit_s:
            return False
        self._told = True
        return True
