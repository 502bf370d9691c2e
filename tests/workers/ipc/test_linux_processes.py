"""Facts about processes from /proc, and the killing of all that a search finds."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys

import pytest
from tests.support.waiting import eventually

from holdfast_workers.ipc import linux_processes

RESTLESS = """
import threading, time
from holdfast_workers.ipc import linux_processes

def run():
    linux_processes.name_thread("restless (one)")
    while True:
        pass

threading.Thread(target=run, daemon=True).start()
time.sleep(600)
"""
WAIT_S = 60.0


def test_is_asleep_can_ignore_a_running_thread() -> None:
    with subprocess.Popen([sys.executable, "-c", RESTLESS]) as process:
        try:
            asleep = lambda: linux_processes.is_asleep(process.pid, ignored_thread="restless (one)")  # noqa: E731
            eventually(asleep, WAIT_S, "it never slept")
            results = [linux_processes.is_asleep(process.pid) for _ in range(20)]
            assert not any(results)
        finally:
            process.kill()


def test_processes_of_all_containers_of_a_machine_name_the_same_machine() -> None:
    program = (
        "import os; from holdfast_workers.ipc.linux_processes import identify\n"
        "found = identify(os.getpid()); print(found.kernel); print(found.machine)"
    )
    apart = ["unshare", "--pid", "--fork", "--mount-proc"]
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("only root may make PID namespaces, with `unshare`")
    command = [*apart, sys.executable, "-c", program]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    kernel, machine = ran.stdout.splitlines()
    here = linux_processes.identify(os.getpid())
    assert kernel != here.kernel, "a PID of one container means nothing in another"
    assert machine == here.machine


def test_what_a_process_starts_indirectly_is_its_descendant_too() -> None:
    with subprocess.Popen(["sh", "-c", "sh -c 'sleep 600; :'; :"], start_new_session=True) as shell:
        try:
            eventually(
                lambda: len(linux_processes.descendants(shell.pid)) == 2, WAIT_S, "two below"
            )
        finally:
            os.killpg(shell.pid, signal.SIGKILL)
    assert linux_processes.descendants(shell.pid) == []


def test_processes_that_are_started_while_others_are_killed_are_killed_too() -> None:
    later = [["sleep", "600"], ["sleep", "600"]]
    running: list[subprocess.Popen[bytes]] = []

    def find() -> list[int]:
        for process in running:
            process.poll()
        if later:
            running.append(subprocess.Popen(later.pop()))
        return [process.pid for process in running if process.returncode is None]

    try:
        killed = linux_processes.kill_all(find, 1000, 0.005)
        assert killed == [process.pid for process in running]
        assert [process.wait(WAIT_S) for process in running] == [-signal.SIGKILL] * 2
    finally:
        for process in running:
            process.kill()


def test_killing_gives_up_after_its_rounds() -> None:
    rounds: list[int] = []

    def find() -> list[int]:
        rounds.append(0)
        return [2**22 + 1]  # no pid is so large

    assert linux_processes.kill_all(find, 3, 0.0) == []
    assert len(rounds) == 3
