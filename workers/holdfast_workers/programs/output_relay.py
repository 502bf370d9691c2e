"""Passes a program's output on to the agent, without ever waiting for the agent to read it.

While the agent does not read, nothing more is read from the program, whose own writes then wait, as
those of any program do whose reader is slow. What a program has left behind at its end is kept
until the agent reads it. Its last line ends with it, whatever is printed next.
"""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections.abc import Callable

from holdfast_workers.ipc import readiness

PIECE_BYTES = 1 << 16


class OutputRelay:
    """Passes output from one pipe to another, and calls `on_piece(piece)` with each piece."""

    def __init__(self, on_piece: Callable[[bytes], None]) -> None:
        # A description of its own: other writers of this pipe stay blocking.
        self._target = os.open("/proc/self/fd/1", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._on_piece = on_piece
        self._kept = b""
        self._line_is_open = False

    @property
    def target(self) -> int:
        """The pipe to the agent, to be waited for while `is_full`."""
        return self._target

    @property
    def is_full(self) -> bool:
        """Whether something waits for the agent."""
        return bool(self._kept)

    def pump(self, source: int) -> bool:
        """Pass one piece of `source` (not blocking) on, or what is left of the last one. False at
        the end of the output."""
        if self._kept:
            self.flush()
            return True
        try:
            piece = os.read(source, PIECE_BYTES)
        except BlockingIOError:
            return True
        self._on_piece(piece)
        self._keep(piece)
        return bool(piece)

    def finish(self, source: int) -> None:
        """Take over what is left in `source` (not blocking), whose writers have ended: no more than
        a pipe holds."""
        with contextlib.suppress(BlockingIOError):
            while piece := os.read(source, PIECE_BYTES):
                self._on_piece(piece)
                self._keep(piece)
        self._end_line()

    def say(self, lines: str) -> None:
        """Pass on whole lines of the launcher itself."""
        self._end_line()
        self._keep(lines.encode(errors="backslashreplace"))

    def drain(self, timeout_s: float) -> None:
        """Wait until nothing is kept any more: this process is about to end."""
        deadline = time.monotonic() + timeout_s
        while self._kept and (left_s := deadline - time.monotonic()) > 0:
            readiness.is_writable(self._target, left_s)
            self.flush()

    def flush(self) -> None:
        """Write what the pipe takes of what is kept."""
        if not self._kept:
            return
        try:
            self._kept = self._kept[os.write(self._target, self._kept) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:  # the agent has ended, and with it all that it had
            self._kept = b""

    def _end_line(self) -> None:
        if self._line_is_open:
            self._keep(b"\n")

    def _keep(self, piece: bytes) -> None:
        if piece:
            self._kept += piece
            self._line_is_open = not piece.endswith(b"\n")
            self.flush()


class RelayedText(io.TextIOBase):
    """A text stream whose lines the relay passes on."""

    def __init__(self, relay: OutputRelay) -> None:
        self._relay = relay
        self._open = ""

    def write(self, text: str) -> int:
        self._open += text
        if self._open.endswith("\n"):
            self._relay.say(self._open)
            self._open = ""
        return len(text)
