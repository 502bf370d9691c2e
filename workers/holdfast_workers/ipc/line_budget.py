"""How many lines of one process its log takes, and the mark where lines were left out. Pure.

A log takes `BURST_LINES` at once and `LINES_PER_S` for ever. Of a process that prints more, the
first lines of each second are kept and the last ones before it becomes slower, or ends: an error
is printed last.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

BURST_LINES = 60_000
LINES_PER_S = 1_000
CHARACTERS_PER_LINE = 1024
"""A longer line counts once more for each such part."""
LAST_LINES = 100


@dataclass(frozen=True)
class LeftOut:
    """Lines that are missing in a log, at this place."""

    lines: int = 0
    bytes: int = 0

    @classmethod
    def of(cls, text: str) -> LeftOut:
        """This line."""
        return cls(1, len(text.encode()) + 1)

    def __add__(self, other: LeftOut) -> LeftOut:
        return LeftOut(self.lines + other.lines, self.bytes + other.bytes)

    def mark(self, rank: int | None, why: str) -> str:
        """The line that stands for them. `rank`: whose they are."""
        lines = f"{self.lines:,} line" + ("" if self.lines == 1 else "s")
        whose = "" if rank is None else f" of rank {rank}"
        return f"WARNING ... {lines} ({self.bytes:,} bytes){whose} left out: {why}"


TOO_FAST = f"more than {LINES_PER_S:,} lines/s"


class LineBudget:
    """The lines that a log takes of one process. `now`: of a monotonic clock, in seconds."""

    def __init__(self) -> None:
        self._room = float(BURST_LINES)
        self._at = 0.0
        self._left_out = LeftOut()
        self._held: deque[str] = deque()
        """The last lines, while there is no room for them."""

    @property
    def holds(self) -> bool:
        """Whether lines wait for room."""
        return bool(self._held)

    def take(self, text: str, now: float) -> list[str | LeftOut]:
        """Take a line; return what the log gets now."""
        self._fill(now)
        if not self._held and _cost(text) <= self._room:
            self._room -= _cost(text)
            return [text]
        self._held.append(text)
        if len(self._held) > LAST_LINES:
            self._left_out += LeftOut.of(self._held.popleft())
        return self.look(now)

    def look(self, now: float) -> list[str | LeftOut]:
        """The lines that have waited, once there is room for those of a whole second."""
        self._fill(now)
        return self.end() if self._room >= LINES_PER_S else []

    def end(self) -> list[str | LeftOut]:
        """All lines that wait, after the mark for those that are left out."""
        found: list[str | LeftOut] = [self._left_out] if self._left_out.lines else []
        found += self._held
        self._room = max(0.0, self._room - sum(map(_cost, self._held)))
        self._left_out, self._held = LeftOut(), deque()
        return found

    def _fill(self, now: float) -> None:
        self._room = min(self._room + max(0.0, now - self._at) * LINES_PER_S, BURST_LINES)
        self._at = max(self._at, now)


def _cost(text: str) -> int:
    return 1 + len(text) // CHARACTERS_PER_LINE
