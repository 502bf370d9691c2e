"""Ends a command that has started a server with KeyboardInterrupt, at any signal to end."""

from __future__ import annotations

import signal
import time
from types import FrameType

from holdfast.cli.printing import output
from holdfast.local_server.end_signals import END_SIGNALS

REPEATED_SIGNAL_S = 2.0


def install(message: str) -> None:
    """Raise KeyboardInterrupt at Ctrl-C, SIGTERM and SIGHUP, and print `message`."""
    interruption = _Interruption(message)
    for number in END_SIGNALS:
        signal.signal(number, interruption)


class _Interruption:
    """A second signal within a short time is ignored; a later one counts again, because some of
    Python's callbacks lose an exception of a signal handler. The clean-up ignores all signals."""

    def __init__(self, message: str) -> None:
        self._message = message
        self._raised = -REPEATED_SIGNAL_S

    def __call__(self, _signal: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - self._raised < REPEATED_SIGNAL_S:
            return
        self._raised = now
        output.stderr().print(self._message)
        raise KeyboardInterrupt
