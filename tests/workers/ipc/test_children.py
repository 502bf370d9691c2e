"""A child ends with the processes it started; a fork survives the death of the zygote."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.nodes.agent_config import agent_config
from tests.support.waiting import eventually

from holdfast_workers.ipc import control_channel, linux_processes
from holdfast_workers.ipc.children import Child, ChildProcesses, ZygoteFailed
from holdfast_workers.ipc.linux_processes import ProcessEnd
from holdfast_workers.protocol.processes import (
    Forked,
    ProcessReady,
    StorageZygoteConfig,
    StoreJob,
    ZygoteConfig,
)

WAIT_S = 60.0


def test_the_processes_that_a_child_started_end_with_its_session() -> None:
    with subprocess.Popen(
        ["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        started = int(process.stdout.readline())
        ours, theirs = control_channel.pair()
        log, writer = os.pipe()
        child = Child(StoreJob(""), "parent", process.pid, os.pidfd_open(process.pid), ours, log)
        child.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert linux_processes.is_alive(started)
        child.end_session()
        assert child.reap() == ProcessEnd(signal=signal.SIGKILL, name="SIGKILL")
        eventually(lambda: not linux_processes.is_alive(started), WAIT_S)
        child.close()
        theirs.close()
        os.close(writer)


class ZygoteThread:
    """A zygote that is a thread: it answers a fork with the pid of this process, or that its
    process has `threads`, or with `dies` closes its socket instead."""

    pid = os.getpid()

    def __init__(self, fd: int, *, dies: bool = False, threads: tuple[str, ...] = ()) -> None:
        self._end = socket.socket(fileno=os.dup(fd))
        self._dies = dies
        self._threads = threads
        threading.Thread(target=self._run, daemon=True).start()

    def poll(self) -> int | None:
        return None

    def kill(self) -> None: ...

    def wait(self, timeout: float | None = None) -> int:
        return 0

    def _run(self) -> None:
        self.config = control_channel.receive(self._end, StorageZygoteConfig, ZygoteConfig)
        control_channel.send(self._end, ProcessReady())
        try:
            _, fds = control_channel.receive_with_fds(self._end, StoreJob)
        except control_channel.ControlClosed:  # it was stopped without a fork
            self._end.close()
            return
        for fd in fds:
            os.close(fd)
        if not self._dies:
            pid = 0 if self._threads else self.pid
            control_channel.send(self._end, Forked(pid, self._threads))
        self._end.close()


def test_a_zygote_that_dies_at_a_fork_is_replaced_and_the_fork_repeated(tmp_path: Path) -> None:
    started: list[ZygoteThread] = []

    def start(fd: int, _env: dict[str, str]) -> ZygoteThread:
        started.append(ZygoteThread(fd, dies=not started))
        return started[-1]

    config = agent_config(tmp_path).zygote_config
    processes = ChildProcesses(config, WAIT_S, WAIT_S, start)
    child = processes.fork("store", StoreJob("127.0.0.1"))
    assert child.pid == ZygoteThread.pid
    assert len(started) == 2
    child.close()
    processes.stop()


def test_a_zygote_that_is_starting_is_ended_at_once(tmp_path: Path) -> None:
    """It may wait for data: whoever stops it does not wait for that."""
    silent: list[ZygoteThatNeverStarts] = []

    def start(fd: int, _env: dict[str, str]) -> ZygoteThatNeverStarts:
        silent.append(ZygoteThatNeverStarts(fd))
        return silent[-1]

    processes = ChildProcesses(agent_config(tmp_path).zygote_config, 10 * WAIT_S, WAIT_S, start)

    def start_in_vain() -> None:
        with contextlib.suppress(ZygoteFailed):
            processes.start()

    starting = threading.Thread(target=start_in_vain)
    starting.start()
    eventually(lambda: bool(silent), WAIT_S)
    stopping = threading.Thread(target=processes.stop)
    stopping.start()
    stopping.join(WAIT_S)
    starting.join(WAIT_S)
    assert not stopping.is_alive() and not starting.is_alive()


class ZygoteThatNeverStarts:
    """Its socket is closed by its end."""

    pid = os.getpid()

    def __init__(self, fd: int) -> None:
        self._end = socket.socket(fileno=os.dup(fd))

    def poll(self) -> int | None:
        return None

    def kill(self) -> None:
        self._end.close()

    def wait(self, timeout: float | None = None) -> int:
        return 0


def test_a_zygote_with_threads_is_replaced_once_by_one_that_does_not_import_the_recipe(
    tmp_path: Path,
) -> None:
    started: list[ZygoteThread] = []
    named: list[tuple[str, ...]] = []

    def start(fd: int, _env: dict[str, str]) -> ZygoteThread:
        started.append(ZygoteThread(fd, threads=() if started else ("users_module (poller)",)))
        return started[-1]

    config = agent_config(tmp_path).zygote_config
    processes = ChildProcesses(config, WAIT_S, WAIT_S, start, on_threads=named.append)
    processes.fork("store", StoreJob("127.0.0.1")).close()
    processes.start()
    assert [each.config for each in started[:2]] == [config, replace(config, imports_recipe=False)]
    assert started[2].config == started[1].config
    assert named == [("users_module (poller)",)]
    processes.stop()


@pytest.mark.parametrize("for_storage", [False, True])
def test_a_zygote_without_the_recipe_that_has_threads_fails_and_names_them(
    tmp_path: Path, for_storage: bool
) -> None:
    def start(fd: int, _env: dict[str, str]) -> ZygoteThread:
        return ZygoteThread(fd, threads=("a_library (pool)",))

    config = agent_config(tmp_path).storage_zygote_config
    if not for_storage:
        config = replace(agent_config(tmp_path).zygote_config, imports_recipe=False)
    processes = ChildProcesses(config, WAIT_S, WAIT_S, start)
    with pytest.raises(ZygoteFailed, match=r"has threads, started by a_library \(pool\)"):
        processes.fork("store", StoreJob("127.0.0.1"))
    processes.stop()


def test_a_zygote_finds_out_about_devices_without_a_driver_context(tmp_path: Path) -> None:
    """A driver's context does not survive a fork; torch checks with NVML instead if told so."""
    environments: list[dict[str, str]] = []

    def start(fd: int, env: dict[str, str]) -> ZygoteThread:
        environments.append(env)
        return ZygoteThread(fd, dies=False)

    processes = ChildProcesses(agent_config(tmp_path).zygote_config, WAIT_S, WAIT_S, start)
    processes.start()
    processes.stop()
    assert environments[0]["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"
