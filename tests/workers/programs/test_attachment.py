"""A process attaches to its launcher, or runs as if without Holdfast."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
from tests.support.nodes.agent_config import join_order
from tests.support.programs.launcher_side import LauncherSide, place_in
from tests.support.waiting import DEADLINE_S

from holdfast_workers.ipc import control_channel
from holdfast_workers.programs.attachment import Attachment
from holdfast_workers.programs.program_attempt import ProgramAttempt
from holdfast_workers.progress.beacon import Beacon
from holdfast_workers.protocol.messages import Restore, Tier
from holdfast_workers.protocol.processes import CommittedToMemory, StepReplicated, WorkerMessage
from holdfast_workers.protocol.programs import SOCKET_VARIABLE, Attached, StateTaken
from holdfast_workers.spec import ProgramSpec, TrainingSpec

WITHOUT_A_LAUNCHER = """
from holdfast_workers.programs.attachment import attach

assert not attach().active and attach() is attach("again")
attach().step(1, loss=1.0)
"""
LISTENS_AS_ANOTHER_USER = """
import os, socket, sys
os.setresuid(65534, 65534, 65534)
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind("\\0" + sys.argv[1])
listener.listen()
print("listening", flush=True)
sys.stdin.read()
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


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may start a program of another user")
def test_a_process_takes_no_orders_of_another_user() -> None:
    name = f"holdfast-test-{uuid.uuid4().hex}"
    other = subprocess.Popen(
        [sys.executable, "-c", LISTENS_AS_ANOTHER_USER, name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout is not None and other.stdout.readline() == "listening\n"
    done = run(WITHOUT_A_LAUNCHER, name)
    other.communicate(timeout=60)
    assert done.returncode == 0, done.stderr
    assert "another user listens there" in done.stderr


def test_the_end_of_a_forked_child_is_not_that_of_the_program(tmp_path: Path) -> None:
    with LauncherSide(place_in(tmp_path, 0, 1)) as launcher:
        done = run(WITH_A_CHILD, launcher.socket_name)
        launcher.wait_for(Attached("parent"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["step"]


def test_what_the_partners_hold_does_not_stand_for_another_save(tmp_path: Path) -> None:
    ours, theirs = control_channel.pair()
    with ours:
        control_channel.send(ours, place_in(tmp_path, 0, 1))
        attached = Attachment(theirs)
        control_channel.send(ours, StepReplicated(1, 30, "first"))
        assert attached.is_replicated(30, "first", DEADLINE_S)
        assert not attached.is_replicated(20, "other")
        attached.report_saved(30)  # again, while the report of the first save is under way
        control_channel.send(ours, StepReplicated(1, 30, "first"))
        control_channel.send(ours, StepReplicated(1, 20, "other"))
        assert attached.is_replicated(20, "other", DEADLINE_S)
        assert not attached.is_replicated(30, "second")


def test_the_state_that_a_program_goes_on_from_is_offered_to_its_partners(tmp_path: Path) -> None:
    sent: list[WorkerMessage] = []
    restore = Restore(Tier.OWN_RAM, 20, 2)
    order = join_order(tmp_path / "own-0.seg", attempt=3, restore=restore)
    spec = TrainingSpec(command=("true",), program=ProgramSpec())
    nothing: Any = None
    beacon = Beacon(Path(place_in(tmp_path, 0, 1).beacon))
    attempt = ProgramAttempt(order, nothing, spec, nothing, beacon, "", (), sent.append)
    attempt.take(StateTaken(20))
    assert sent == [CommittedToMemory(2, 20)]
