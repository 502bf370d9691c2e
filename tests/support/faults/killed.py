"""Processes that are killed at a given operation, or at a moment: forked, and dead by SIGKILL."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

Operation = tuple[Any, str]
"""What has the function or method, and its name."""


class Killed:
    """A child that runs `body` and kills itself as it comes to its `at`-th call of any of
    `operations`; without them it is killed from outside, by `kill`."""

    def __init__(
        self, body: Callable[[], None], operations: Sequence[Operation] = (), at: int = -1
    ) -> None:
        self.pid = os.fork()
        if self.pid:
            self._over = os.pidfd_open(self.pid)
            return
        try:
            numbers = itertools.count()
            for owner, name in operations:
                _count(owner, name, numbers, at)
            body()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)

    def kill(self, after_s: float) -> None:
        time.sleep(after_s)
        with contextlib.suppress(ProcessLookupError):  # it has ended, and waits to be reaped
            signal.pidfd_send_signal(self._over, signal.SIGKILL)

    def end(self, timeout_s: float = 20.0) -> bool:
        """Wait for its end: True if it was killed, False if it got to the end of `body`."""
        gone = bool(select.select([self._over], [], [], timeout_s)[0])
        if not gone:
            os.kill(self.pid, signal.SIGKILL)
        _pid, status = os.waitpid(self.pid, 0)
        os.close(self._over)
        assert gone, "it neither ended nor came to the operation at which it was to be killed"
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "it failed by itself"
        return os.WIFSIGNALED(status)


def _count(owner: Any, name: str, numbers: itertools.count[int], at: int) -> None:
    original = getattr(owner, name)

    def counted(*arguments: Any, **named: Any) -> Any:
        if next(numbers) == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **named)

    setattr(owner, name, counted)
