"""The last lines that a program printed, for the report of its end."""

from __future__ import annotations

from collections import deque

KEPT_LINES = 40
KEPT_CHARACTERS = 4096
_OPEN_LINE_BYTES = 64 * 1024


class OutputTail:
    """Splits output into lines, and keeps the last."""

    def __init__(self) -> None:
        self.bytes = 0
        """Length of all output so far."""
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._open = b""

    def feed(self, piece: bytes) -> list[str]:
        """Take a piece of output, and return the lines that it completes."""
        self.bytes += len(piece)
        *whole, rest = (self._open + piece).split(b"\n")
        self._open = rest[-_OPEN_LINE_BYTES:]
        lines = [line.decode(errors="replace").rstrip("\r") for line in whole]
        self._lines.extend(lines)
        return lines

    def text(self) -> str:
        """The last lines, one that is not complete included."""
        lines = [*self._lines, self._open.decode(errors="replace")]
        return "\n".join(line for line in lines if line.strip())[-KEPT_CHARACTERS:]
