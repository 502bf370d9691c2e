"""Passes a program's output on to the agent, without ever waiting for the agent to read it.

While the agent does not read, nothing more is read from the program, whose own writes then wait, as
those of any program do whose reader is slow.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Callable

PIECE_BYTES = 1 << 16
LAST_WAIT_S = 5.0
"""How long the output of a program that has ended may wait for the agent."""


class OutputRelay:
    """Passes output from one pipe to another, and calls `on_piece(piece)` with each piece."""

    def __init__(self, on_piece: Callable[[bytes], None]) -> None:
        # A description of its own: other writers of this pipe stay blocking.
        self._target = os.open("/proc/self/fd/1", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._on_piece = on_piece
        self._kept = b""

    @property
    def target(self) -> int:
        """The pipe to the agent, to be waited for while `is_full`."""
        return self._target

    @property
    def is_full(self) -> bool:
        """Whether a piece waits for the agent."""
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
        self._kept = piece
        self.flush()
        return bool(piece)

    def finish(self, source: int) -> None:
        """Pass on what is left in `source`, whose writers have ended."""
        os.set_blocking(source, False)
        deadline = time.monotonic() + LAST_WAIT_S
        while self._kept or is_readable(source):
            if not self.pump(source):
                return
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return
            if self._kept:
                select.select([], [self._target], [], left_s)

    def close(self) -> None:
        os.close(self._target)

    def flush(self) -> None:
        """Write what the pipe takes of the piece that waits."""
        if not self._kept:
            return
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            self._kept = self._kept[os.write(self._target, self._kept) :]


def is_readable(source: int | socket.socket) -> bool:
    """Whether a read would not wait."""
    return bool(select.select([source], [], [], 0)[0])
