"""A child ends with the processes it started; a fork survives the death of the zygote."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading

from tests.support.waiting import eventually

from holdfast_workers.ipc import control_channel, linux_processes
from holdfast_workers.ipc.children import Child, ChildProcesses
from holdfast_workers.ipc.linux_processes import ProcessEnd

WAIT_S = 10.0


def test_the_processes_that_a_child_started_end_when_it_is_reaped() -> None:
    with subprocess.Popen(
        ["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        started = int(process.stdout.readline())
        ours, theirs = control_channel.pair()
        log, writer = os.pipe()
        child = Child("worker", "parent", process.pid, os.pidfd_open(process.pid), ours, log)
        child.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert linux_processes.is_alive(started)
        assert child.reap() == ProcessEnd(signal=signal.SIGKILL, name="SIGKILL")
        eventually(lambda: not linux_processes.is_alive(started), WAIT_S)
        child.close()
        theirs.close()
        os.close(writer)


class ZygoteThread:
    """A zygote that is a thread: it answers a fork with the pid of this process, or with `dies`
    closes its socket instead."""

    pid = os.getpid()

    def __init__(self, fd: int, *, dies: bool) -> None:
        self._end = socket.socket(fileno=os.dup(fd))
        self._dies = dies
        threading.Thread(target=self._run, daemon=True).start()

    def poll(self) -> int | None:
        return None

    def kill(self) -> None: ...

    def wait(self) -> int:
        return 0

    def _run(self) -> None:
        control_channel.receive(self._end)
        control_channel.send(self._end, {"op": "ready"})
        _, fds = control_channel.receive_with_fds(self._end)
        for fd in fds:
            os.close(fd)
        if not self._dies:
            control_channel.send(self._end, {"pid": self.pid})
        self._end.close()


def test_a_zygote_that_dies_at_a_fork_is_replaced_and_the_fork_repeated() -> None:
    started: list[ZygoteThread] = []

    def start(fd: int, _env: dict[str, str]) -> ZygoteThread:
        started.append(ZygoteThread(fd, dies=not started))
        return started[-1]

    processes = ChildProcesses({}, WAIT_S, WAIT_S, start)
    child = processes.fork("worker", "w0", {})
    assert child.pid == ZygoteThread.pid
    assert len(started) == 2
    child.close()
    processes.stop()
