"""What /proc tells of a process: whether it waits, whichever of its threads goes on."""

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


def test_a_thread_that_goes_on_can_be_left_out_of_whether_a_process_sleeps() -> None:
    with subprocess.Popen([sys.executable, "-c", RESTLESS]) as process:
        try:
            asleep = lambda: linux_processes.sleeps(process.pid, but="restless (one)")  # noqa: E731
            eventually(asleep, WAIT_S, "it never slept")
            looks = [linux_processes.sleeps(process.pid) for _ in range(20)]
            assert not any(looks)
        finally:
            process.kill()
