"""The lines of what a process prints, and those of them that its log keeps. Pure.

`\\n` and `\\r\\n` end a line, and so does `\\r`: a progress bar ends each of its states by it, and
the next takes its place. The lines are the same wherever the output was cut into pieces.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

LINE_BYTES = 8 * 1024
"""A longer line is divided."""
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
    """The lines of one process that its log keeps: all but the states of a progress bar that
    another follows soon."""

    def __init__(self) -> None:
        self._splitter = LineSplitter()
        self._waiting: str | None = None  # a state that is kept unless another takes its place
        self._next_state_at = -math.inf

    def feed(self, piece: bytes, now: float) -> list[str]:
        """Take a piece of output; return what the log keeps now. `now`: of a monotonic clock."""
        kept: list[str] = []
        for line in self._splitter.feed(piece):
            if line.is_state:
                self._take_state(line.text, now, kept)
            else:
                self._take_line(line.text, kept)
        return kept

    def end(self) -> list[str]:
        """The last state of a bar, and the line without end: the process has ended."""
        last = (self._waiting, self._splitter.open)
        return [text for text in last if text]

    def _take_state(self, text: str, now: float, kept: list[str]) -> None:
        if now < self._next_state_at or not text.strip():  # spaces erase the bar
            self._waiting = text if text.strip() else None
            return
        kept.append(text)
        self._waiting, self._next_state_at = None, now + STATE_S

    def _take_line(self, text: str, kept: list[str]) -> None:
        if self._waiting is not None:
            kept.append(self._waiting)
            self._waiting = None
        kept.append(text)


def _divide(line: bytes, lines: list[OutputLine]) -> bytes:
    """Add the full parts of a long line to `lines`, and return its rest."""
    while len(line) > LINE_BYTES:
        cut = LINE_BYTES
        while cut > LINE_BYTES - 4 and line[cut] & 0xC0 == 0x80:  # within a character
            cut -= 1
        lines.append(OutputLine(_text(line[:cut]), is_state=False))
        line = line[cut:]
    return line


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace")
