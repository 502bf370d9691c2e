"""A subreaper reaps what its children left behind, and takes no exit status from anybody."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import subprocess, sys, time
from holdfast_workers.ipc import linux_processes
from holdfast_workers.ipc.orphans import Orphans

linux_processes.become_subreaper()
own = subprocess.Popen(["sh", "-c", "exit 7"])
subprocess.run(["sh", "-c", "for i in 1 2 3; do setsid true & done"])
while len(linux_processes.ended_children()) < 4:
    time.sleep(0.01)
orphans = Orphans(lambda pid: pid == own.pid)
orphans.reap()
assert len(linux_processes.ended_children()) == 4, "a process just forked may be owned soon"
orphans.reap()
assert linux_processes.ended_children() == {own.pid}
assert own.wait() == 7
assert linux_processes.ended_children() == set()
"""
WAIT_S = 60.0


def test_orphans_are_reaped_and_owned_children_are_not() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], timeout=WAIT_S, check=True)
