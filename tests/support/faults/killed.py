"""Forked processes that are killed by SIGKILL at a given operation or at a given time."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from tests.support.waiting import DEADLINE_S

from holdfast_workers.ipc import readiness

Operation = tuple[Any, str]
"""The owner of a function or method, and its name."""


class KilledProcess:
    """A child that runs `body` and kills itself before its `at`-th call (from 0) of any of
    `operations`. Without operations, `kill` kills it from outside."""

    def __init__(
        self, body: Callable[[], None], operations: Sequence[Operation] = (), at: int = -1
    ) -> None:
        self.pid = os.fork()
        if self.pid:
            self._pidfd = os.pidfd_open(self.pid)
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
        with contextlib.suppress(ProcessLookupError):  # it has ended and is not reaped yet
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def end(self, timeout_s: float = DEADLINE_S) -> bool:
        """Wait for its end. True if it was killed, False if `body` completed."""
        ended = readiness.is_readable(self._pidfd, timeout_s)
        if not ended:
            os.kill(self.pid, signal.SIGKILL)
        _pid, status = os.waitpid(self.pid, 0)
        os.close(self._pidfd)
        assert ended, "it neither ended nor reached the operation at which it must be killed"
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "it failed on its own"
        return os.WIFSIGNALED(status)


def _count(owner: Any, name: str, numbers: itertools.count[int], at: int) -> None:
    original = getattr(owner, name)

    def counted(*arguments: Any, **named: Any) -> Any:
        if next(numbers) == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **named)

    setattr(owner, name, counted)
