"""Process facts from /proc: a process counts as asleep although an ignored thread runs."""

from __future__ import annotations

import subprocess
import sys

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
