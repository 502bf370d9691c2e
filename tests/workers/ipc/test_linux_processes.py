"""Process facts from /proc: sleep, in spite of an ignored thread, and the machine of a process."""

from __future__ import annotations

import os
import shutil
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
WAIT_S = 20.0


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
