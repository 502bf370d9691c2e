"""A process beside a launcher that kills what its program has started once the launcher has ended.

The kernel kills a launcher with its agent, and the program with its launcher, in the same instant.
What the program has started itself does not end with it: the guard kills that, by its session and
by the mark in its environment.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import NoReturn

from holdfast_workers.ipc import linux_processes, readiness

ROUND_S = 0.005
MOST_ROUNDS = 1000


def start_guard(mark: str) -> None:
    """Start the guard of this process, the leader of a session. `mark`: the variable, with its
    value, that all processes have which the program executes. Raises OSError."""
    launcher = os.getpid()
    pidfd = os.pidfd_open(launcher)
    middle = os.fork()
    if middle == 0:
        try:
            if os.fork() == 0:
                _watch(launcher, pidfd, mark)
        finally:
            os._exit(0)
    os.close(pidfd)
    os.waitpid(middle, 0)


def _watch(launcher: int, pidfd: int, mark: str) -> NoReturn:
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        linux_processes.name_process("hf-guard")
        _close_all_but(pidfd)
        readiness.is_readable(pidfd, None)
        linux_processes.kill_all(lambda: _left(launcher, mark), MOST_ROUNDS, ROUND_S)
    finally:
        os._exit(0)


def _left(launcher: int, mark: str) -> set[int]:
    found = {*linux_processes.session_members(launcher), *linux_processes.marked(mark)}
    return found - {os.getpid()}


def _close_all_but(kept: int) -> None:
    """A control socket or log that the guard held would look as if its process lived."""
    for entry in Path("/proc/self/fd").iterdir():
        if int(entry.name) != kept:
            with contextlib.suppress(OSError):
                os.close(int(entry.name))
