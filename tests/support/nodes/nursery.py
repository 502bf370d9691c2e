"""Agents and zygotes without the import of torch: they are forked from a process that has done it.

A zygote's imports take some seconds, and nearly every recovery test starts three zygotes. Here one
process of the whole test run imports. A `NurseryProcess` is an agent forked from it; the agent
forks its zygotes from a copy of that process, made before the agent has threads. All else is as in
production: a process forked by a zygote has the agent as its parent, and ends with it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from holdfast_workers.ipc import control_channel, readiness
from holdfast_workers.protocol.processes import Forked

ANSWER_S = 120.0
KEPT_FDS = 3
READ_BYTES = 32


@dataclass(frozen=True)
class _Start:
    """Start an agent, or a zygote of this agent."""

    env: dict[str, str]
    agent: int = 0


class NurseryProcess:
    """Part of the interface of `subprocess.Popen`, for a process that is not our child."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)
        self._lock = threading.Lock()

    def __del__(self) -> None:
        os.close(self._pidfd)

    def poll(self) -> int | None:
        """None while the process lives; its real exit code is unknown."""
        return self._ended(0.0)

    def wait(self, timeout: float | None = None) -> int:
        ended = self._ended(timeout)
        if ended is None:
            raise TimeoutError(f"process {self.pid} did not end in {timeout} s")
        return ended

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def _ended(self, timeout_s: float | None) -> int | None:
        return -1 if readiness.is_readable(self._pidfd, timeout_s) else None


def start_agent(connection: int) -> NurseryProcess:
    """Start an agent (`agent_process.py`) that communicates over this descriptor."""
    return _shared().fork(connection)


class _Nursery:
    """The process that has imported everything; shared by all tests of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._end, theirs = control_channel.pair()
        self._end.settimeout(ANSWER_S)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.nodes.nursery", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        )
        theirs.close()
        atexit.register(self._stop)

    def fork(self, connection: int) -> NurseryProcess:
        with self._lock:
            control_channel.send(self._end, _Start(dict(os.environ)), (connection,))
            return NurseryProcess(control_channel.receive(self._end, Forked).pid)

    def _stop(self) -> None:
        self._end.close()
        self._process.wait(ANSWER_S)


@functools.cache
def _shared() -> _Nursery:
    return _Nursery()


def main() -> None:
    end = socket.socket(fileno=int(sys.argv[1]))
    _import_all()
    gc.collect()
    gc.freeze()  # as a zygote does: the collections of every agent and zygote would touch it all
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # an ended child is reaped at once
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(control_channel.ControlClosed):
        while True:
            request, (connection,) = control_channel.receive_with_fds(end, _Start)
            pid = os.fork()
            if pid == 0:
                end.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _run_agent(connection, request.env)
            os.close(connection)
            control_channel.send(end, Forked(pid))


def _import_all() -> None:
    """Import all that `child_programs/zygote.py` imports; this starts no threads."""
    import torch
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel

    torch.set_num_threads(1)
    from tests.support.nodes import agent_process  # noqa: F401

    from holdfast_workers.checkpoint import s3  # noqa: F401
    from holdfast_workers.child_programs import saver, store_host  # noqa: F401
    from holdfast_workers.recipes import pretrain  # noqa: F401
    from holdfast_workers.worker import main as worker  # noqa: F401


def _run_agent(connection: int, env: dict[str, str]) -> NoReturn:
    from multiprocessing.connection import Connection

    from tests.support.nodes import agent_process

    code = 1
    try:
        os.environ.clear()
        os.environ.update(env)
        zygotes = _Zygotes()
        agent_process.local(Connection(connection), zygotes.start)
        code = 0
    finally:
        os._exit(code)


class _Zygotes:
    """Forks zygotes for an agent. Created while the agent still has a single thread."""

    def __init__(self) -> None:
        self._end, theirs = control_channel.pair()
        self._lock = threading.Lock()
        if os.fork() == 0:
            _serve_zygotes(theirs)
        theirs.close()

    def start(self, fd: int, env: dict[str, str]) -> NurseryProcess:
        with self._lock:
            control_channel.send(self._end, _Start(env, os.getpid()), (fd,))
            return _AdoptedZygote(control_channel.receive(self._end, Forked).pid)


class _AdoptedZygote(NurseryProcess):
    """The agent becomes its parent once the process between them has ended, and reaps it."""

    def _ended(self, timeout_s: float | None) -> int | None:
        ended = super()._ended(timeout_s)
        if ended is not None:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
        return ended


def _serve_zygotes(end: socket.socket) -> NoReturn:
    try:
        _close_all_but(end.fileno())
        with contextlib.suppress(control_channel.ControlClosed):
            while True:
                request, (fd,) = control_channel.receive_with_fds(end, _Start)
                reader, writer = os.pipe()
                middle = os.fork()
                if middle == 0:
                    zygote = os.fork()
                    if zygote:
                        os.write(writer, str(zygote).encode())
                        os._exit(0)
                    _run_zygote(fd, request)
                os.waitpid(middle, 0)
                os.close(fd)
                control_channel.send(end, Forked(int(os.read(reader, READ_BYTES))))
                os.close(reader)
                os.close(writer)
    finally:
        os._exit(0)


def _run_zygote(fd: int, request: _Start) -> NoReturn:
    from holdfast_workers.child_programs import zygote

    try:
        _close_all_but(fd)
        os.setsid()
        os.environ.clear()
        os.environ.update(request.env)
        sys.argv = ["zygote", str(fd), str(request.agent)]
        zygote.main()
    finally:
        os._exit(0)


def _close_all_but(kept: int) -> None:
    """Inherited descriptors would keep sockets open whose end another process waits for."""
    for fd in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if fd >= KEPT_FDS and fd != kept:
            with contextlib.suppress(OSError):  # the descriptor of the listing itself
                os.close(fd)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


if __name__ == "__main__":
    Path("/proc/self/comm").write_text("nursery")
    main()
