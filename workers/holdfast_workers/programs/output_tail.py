"""The last lines that a program printed, for the report of its end."""

from __future__ import annotations

from collections import deque

from holdfast_workers.ipc.output_lines import LineSplitter, OutputLine

KEPT_LINES = 40
KEPT_CHARACTERS = 4096


class OutputTail:
    """Splits output into lines, and keeps the last; of a progress bar its last state."""

    def __init__(self) -> None:
        self.bytes = 0
        """Length of all output so far."""
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._after_state = False
        self._splitter = LineSplitter()

    def feed(self, piece: bytes) -> list[OutputLine]:
        """Take a piece of output, and return the lines that it completes."""
        self.bytes += len(piece)
        lines = self._splitter.feed(piece)
        for line in lines:
            if line.is_state and self._after_state:
                self._lines[-1] = line.text
            else:
                self._lines.append(line.text)
            self._after_state = line.is_state
        return lines

    def text(self) -> str:
        """The last lines, one that is not complete included."""
        lines = [*self._lines, self._splitter.open]
        return "\n".join(line for line in lines if line.strip())[-KEPT_CHARACTERS:]
