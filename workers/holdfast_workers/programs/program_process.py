"""The process of a program: forked from its launcher, in a process group of its own.

A script may run in the fork itself, with everything imported that the launcher has; a command, or a
script with `fork: false`, is executed in it. The process dies with its launcher. What it starts,
and leaves behind, is killed when it has ended, or when its time is over if it was asked to end: the
launcher is its reaper.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from holdfast_workers.ipc import linux_processes
from holdfast_workers.ipc.linux_processes import ProcessEnd
from holdfast_workers.programs import fresh_interpreter, python_main

MOST_ROUNDS = 20
CLEAR_S = 2.5
"""How long killed descendants of a program may take to end."""
_CLEAR_POLL_S = 0.005
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class ProgramLine:
    """The program that a rank runs."""

    arguments: tuple[str, ...]
    """The arguments; those of a script are without the interpreter."""
    is_script: bool
    fork: bool
    """Whether it runs in a fork of its launcher, which only a script can."""

    @property
    def command(self) -> list[str]:
        """The command line of a new process."""
        return [sys.executable, "-u", *self.arguments] if self.is_script else [*self.arguments]


class ProgramProcess:
    """One running program. Used by one thread."""

    def __init__(
        self,
        line: ProgramLine,
        variables: Mapping[str, str],
        private: Sequence[int],
        in_fork: Callable[[], None],
        on_end: Callable[[Exception | int], None],
    ) -> None:
        """`private`: the launcher's descriptors, which the program must not hold. `in_fork()` is
        called in the new process before a forked script starts; `on_end` as in
        `python_main.run`. Raises OSError if no process can be started."""
        reader, writer = os.pipe()
        launcher = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            os.close(reader)
            os.close(writer)
            raise
        if pid == 0:
            os.close(reader)
            for descriptor in private:
                os.close(descriptor)
            _become(line, variables, writer, launcher, in_fork, on_end)
        os.close(writer)
        with contextlib.suppress(OSError):  # it has done so itself, or has ended
            os.setpgid(pid, pid)
        os.set_blocking(reader, False)
        self.pid = pid
        self.output = reader
        """The reading end of its output, not blocking."""
        try:
            self.pidfd = os.pidfd_open(pid)
        except OSError:  # it must not run unwatched
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(reader)
            raise

    def signal_all(self, number: signal.Signals) -> None:
        """Send a signal to the program and to all that it has started, also in other groups."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)
        reached: set[int] = set()
        for _ in range(MOST_ROUNDS):  # until none of them has started another meanwhile
            below = linux_processes.descendants(os.getpid())
            apart = {pid for pid in below if not _is_in_group(pid, self.pid)}
            if apart <= reached:
                return
            for pid in apart - reached:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
            reached |= apart

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the program alone. One that ends it leaves no core file."""
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(self.pid, resource.RLIMIT_CORE, (0, 0))
            signal.pidfd_send_signal(self.pidfd, number)

    def reap_orphans(self) -> None:
        """Reap what the program has left behind and what has ended since."""
        for pid in linux_processes.ended_children() - {self.pid}:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)

    def has_left_others(self) -> bool:
        """Whether anything that the program has started still runs, now that it has ended."""
        self.reap_orphans()
        left = linux_processes.descendants(os.getpid())
        return any(linux_processes.is_alive(pid) for pid in left if pid != self.pid)

    def processor_s(self) -> float:
        """Processor time of the program and its descendants so far, in seconds; of those that have
        ended, as far as somebody waited for them."""
        return sum(map(_processor_s, (self.pid, *linux_processes.descendants(self.pid))))

    def reap(self) -> ProcessEnd:
        """Collect the exit status, once the pidfd is readable, and kill what it left behind."""
        self.signal_all(signal.SIGKILL)  # not reaped yet: the group is its own
        _, status = os.waitpid(self.pid, 0)
        kill_descendants(CLEAR_S)
        return linux_processes.process_end(status)

    def close(self) -> None:
        """Close the descriptors."""
        os.close(self.output)
        os.close(self.pidfd)


def _processor_s(pid: int) -> float:
    return sum(map(int, linux_processes.stat_fields(pid)[11:15])) / _TICKS_PER_S


def kill_descendants(wait_s: float) -> bool:
    """Kill all descendants of this process, which as a subreaper inherits the orphans. False if
    some are left after `wait_s`: they wait for a device or a file system."""
    deadline = time.monotonic() + wait_s
    while left := linux_processes.descendants(os.getpid()):
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if time.monotonic() >= deadline:
            return False
        time.sleep(_CLEAR_POLL_S)
    return True


def _is_in_group(pid: int, group: int) -> bool:
    try:
        return os.getpgid(pid) == group
    except ProcessLookupError:
        return True


def _become(
    line: ProgramLine,
    variables: Mapping[str, str],
    output: int,
    launcher: int,
    in_fork: Callable[[], None],
    on_end: Callable[[Exception | int], None],
) -> NoReturn:
    try:
        os.setpgid(0, 0)
        linux_processes.die_with_parent(launcher, 1.0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        empty = os.open(os.devnull, os.O_RDONLY)
        for descriptor, target in ((empty, 0), (output, 1), (output, 2)):
            os.dup2(descriptor, target)
        os.close(empty)
        os.close(output)
        if not line.fork:
            _execute(line.command, variables)
        os.environ.clear()
        os.environ.update(variables)
        fresh_interpreter.restore(line.arguments)
        in_fork()
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode(errors="replace"))
        os._exit(127)
    python_main.run(line.arguments, on_end)


def _execute(command: list[str], variables: Mapping[str, str]) -> NoReturn:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, other programs do not
    try:
        os.execvpe(command[0], command, dict(variables))
    except OSError as error:
        os.write(2, f"cannot run {command[0]}: {error.strerror}\n".encode())
        os._exit(126 if isinstance(error, PermissionError) else 127)
