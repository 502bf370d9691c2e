"""The lines of what a process prints, and those of them that its log keeps. Pure.

`\\n` and `\\r\\n` end a line, and so does `\\r`: a progress bar ends each of its states by it, and
the next takes its place. The lines are the same wherever the output was cut into pieces.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from holdfast_workers.ipc.line_budget import LeftOut, LineBudget

LINE_BYTES = 8 * 1024
"""A longer line is divided."""
GOES_ON = "…"
"""In a log, the end of each part of a divided line but the last."""
STATE_S = 1.0
"""Time in which the log keeps one of the states of a progress bar; it keeps the last one too."""
_END = re.compile(rb"\r?\n|\r(?=[^\n])", re.DOTALL)
"""A carriage return at the end of a piece waits for the next byte."""


@dataclass(frozen=True)
class OutputLine:
    """A line without its end."""

    text: str
    is_state: bool
    """Whether it ended by `\\r`."""
    goes_on: bool = False
    """Whether the next one is a further part of the same, long line."""


class LineSplitter:
    """Splits the output of one process."""

    def __init__(self) -> None:
        self._open = b""

    @property
    def open(self) -> str:
        """The last line, which has no end yet."""
        return _text(self._open.removesuffix(b"\r"))

    def feed(self, piece: bytes) -> list[OutputLine]:
        """Take a piece of output, and return the lines that it completes."""
        lines: list[OutputLine] = []
        raw, start = self._open + piece, 0
        for end in _END.finditer(raw):
            rest = _divide(raw[start : end.start()], lines)
            lines.append(OutputLine(_text(rest), is_state=end[0] == b"\r"))
            start = end.end()
        rest = raw[start:]
        ends = b"\r" if rest.endswith(b"\r") else b""
        self._open = _divide(rest.removesuffix(ends), lines) + ends
        return lines


class LogLines:
    """What the log keeps of the lines of one process: all but the states of a progress bar that
    another follows soon, and those beyond its `LineBudget`. `now`: of a monotonic clock."""

    def __init__(self) -> None:
        self._splitter = LineSplitter()
        self._budget = LineBudget()
        self._waiting: str | None = None  # a state that is kept unless another takes its place
        self._next_state_at = -math.inf

    @property
    def waits(self) -> bool:
        """Whether `look` will return something later."""
        return self._waiting is not None or self._budget.holds

    def feed(self, piece: bytes, now: float) -> list[str | LeftOut]:
        """Take a piece of output; return what the log keeps now."""
        kept: list[str | LeftOut] = []
        for line in self._splitter.feed(piece):
            if line.is_state:
                kept += self._take_state(line.text, now)
            else:
                kept += self._end_state(now)
                kept += self._budget.take(line.text + GOES_ON * line.goes_on, now)
        return kept

    def look(self, now: float) -> list[str | LeftOut]:
        """What the log keeps now of what has waited."""
        kept: list[str | LeftOut] = []
        if self._waiting is not None and now >= self._next_state_at:
            kept, self._next_state_at = self._end_state(now), now + STATE_S
        return kept + self._budget.look(now)

    def release(self, now: float) -> list[str | LeftOut]:
        """All lines that have waited."""
        return self._end_state(now) + self._budget.end()

    def end(self, now: float) -> list[str | LeftOut]:
        """The last state of a bar, and the line without end: the process has ended."""
        kept = self._end_state(now)
        if self._splitter.open:
            kept += self._budget.take(self._splitter.open, now)
        return kept + self._budget.end()

    def _take_state(self, text: str, now: float) -> list[str | LeftOut]:
        if now < self._next_state_at or not text.strip():  # spaces erase the bar
            self._waiting = text if text.strip() else None
            return []
        self._waiting, self._next_state_at = None, now + STATE_S
        return self._budget.take(text, now)

    def _end_state(self, now: float) -> list[str | LeftOut]:
        if self._waiting is None:
            return []
        text, self._waiting = self._waiting, None
        return self._budget.take(text, now)


def _divide(line: bytes, lines: list[OutputLine]) -> bytes:
    """Add the full parts of a long line to `lines`, and return its rest."""
    while len(line) > LINE_BYTES:
        cut = LINE_BYTES
        while cut > LINE_BYTES - 4 and line[cut] & 0xC0 == 0x80:  # within a character
            cut -= 1
        lines.append(OutputLine(_text(line[:cut]), is_state=False, goes_on=True))
        line = line[cut:]
    return line


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace")
