"""What a program's output shows: its last lines, for the report of its end, and signs of life."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from holdfast_workers.ipc.output_lines import LINE_BYTES, LineSplitter, OutputLine
from holdfast_workers.programs import error_file
from holdfast_workers.protocol.messages import UNKNOWN_STEP

KEPT_LINES = 40
KEPT_CHARACTERS = 4096
BUSY_SHARE = 0.05
"""A program that takes less of a processor's time than this does nothing."""


class OutputTail:
    """Splits output into lines, and keeps the last; of a progress bar its last state."""

    def __init__(self) -> None:
        self.bytes = 0
        """Length of all output so far."""
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._after_state = False
        self._parts = 0
        """Number of parts so far of a long line: the first and the last are kept."""
        self._splitter = LineSplitter()

    def feed(self, piece: bytes) -> list[OutputLine]:
        """Take a piece of output, and return the lines that it completes."""
        self.bytes += len(piece)
        lines = self._splitter.feed(piece)
        for line in lines:
            if (line.is_state and self._after_state) or (self._parts > 1 and not line.is_state):
                self._lines[-1] = line.text
            else:
                self._lines.append(line.text)
            self._after_state = line.is_state
            self._parts = self._parts + 1 if _is_part(line.text) else 0
        return lines

    def text(self) -> str:
        """The last lines, one that is not complete included."""
        lines = [error_file.short_line(line) for line in (*self._lines, self._splitter.open)]
        return "\n".join(line for line in lines if line.strip())[-KEPT_CHARACTERS:]


def _is_part(text: str) -> bool:
    """Whether the line goes on: `LineSplitter` has divided it."""
    return len(text) >= LINE_BYTES // 4 and len(text.encode(errors="replace")) >= LINE_BYTES - 3


@dataclass
class ShownSteps:
    """The steps that one rank has shown itself in an attempt, in its lines or by its attachment.
    Pure. They tell where it failed: what a rank shows once, at its start, does not."""

    newest: int = UNKNOWN_STEP
    number: int = 0

    def add(self, step: int) -> None:
        if step > self.newest:
            self.newest, self.number = step, self.number + 1

    def place(self, *, reports: bool) -> int:
        """The step at which the rank is. `reports`: it is the rank that shows the world's steps."""
        return self.newest if self.number > (0 if reports else 1) else UNKNOWN_STEP


@dataclass
class Silence:
    """The signs of life of a program that shows no steps, as seen by one look after the other: it
    prints, or it computes. Pure. A rank that waits for its peers sleeps, but for threads that look
    at the time now and then."""

    printed: int = 0
    """Bytes of output at the last look."""
    computed_s: float = 0.0
    """Processor time at the last look, in seconds."""
    looked_at: float = 0.0
    shown_at: float = 0.0
    """Time of the last look at which the program had printed, or of its last step."""
    alive_at: float = 0.0
    """Time of the last look at which it had printed or computed, or of its last step."""

    def has_sign_of_life(self, printed: int, computed_s: float, now: float) -> bool:
        """Whether the program has printed or computed since the last look."""
        share = (computed_s - self.computed_s) / max(1e-9, now - self.looked_at)
        if printed != self.printed:
            self.shown_at = now
        alive = printed != self.printed or share >= BUSY_SHARE
        if alive:
            self.alive_at = now
        self.printed, self.computed_s, self.looked_at = printed, computed_s, now
        return alive

    def show(self, now: float) -> None:
        """The program starts, goes on, or has taken a step."""
        self.shown_at = self.alive_at = now
