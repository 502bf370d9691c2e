"""A process attaches to its launcher, or runs as if without Holdfast."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.programs.launcher_side import LauncherSide, place_in

from holdfast_workers.protocol.programs import SOCKET_VARIABLE, Attached

WITHOUT_A_LAUNCHER = """
from holdfast_workers.programs.attachment import attach

assert not attach().active and attach() is attach("again")
attach().step(1, loss=1.0)
"""
WITH_A_CHILD = """
import os, sys
from pathlib import Path
from holdfast_workers.programs.attachment import attach
from holdfast_workers.progress.beacon import BeaconReader

attached = attach("parent")
attached.step(1)
child = os.fork()
if child == 0:
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
print(BeaconReader(Path(attached.place.beacon)).read().phase)
"""


def run(program: str, socket_name: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, SOCKET_VARIABLE: socket_name, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_process_that_cannot_reach_the_launcher_runs_as_without_one() -> None:
    done = run(WITHOUT_A_LAUNCHER, "holdfast-test-nobody-listens")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("its launcher cannot be reached") == 1
    assert "HOLDFAST_PROGRAM_SOCKET=holdfast-test-nobody-listens" in done.stderr


def test_the_end_of_a_forked_child_is_not_that_of_the_program(tmp_path: Path) -> None:
    with LauncherSide(place_in(tmp_path, 0, 1)) as launcher:
        done = run(WITH_A_CHILD, launcher.socket_name)
        launcher.wait_for(Attached("parent"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["step"]
