"""A process sees that its owner has ended, also if several processes share the pipe."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.waiting import DEADLINE_S, eventually

from holdfast_service.embedded_cluster.owner_pipe import NotAPipe, OwnerPipe


def test_a_killed_owner_has_ended_for_all_that_share_its_pipe() -> None:
    read, write = os.pipe()
    pipes = [OwnerPipe(read), OwnerPipe(os.dup(read))]
    owner = subprocess.Popen(
        [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"],
        pass_fds=(write,),
        stdout=subprocess.PIPE,
    )
    os.close(write)
    assert owner.stdout is not None and owner.stdout.readline()
    assert [pipe.owner_has_ended() for pipe in pipes] == [False, False]
    owner.kill()
    eventually(lambda: all(pipe.owner_has_ended() for pipe in pipes))
    assert all(pipe.owner_has_ended() for pipe in pipes), "it stays ended"
    owner.wait()
    owner.stdout.close()
    for pipe in pipes:
        os.close(pipe.fileno())


def test_a_terminal_or_a_file_is_no_pipe_of_an_owner() -> None:
    with Path(os.devnull).open() as null, pytest.raises(NotAPipe):
        OwnerPipe(null.fileno())
    terminal, other = os.openpty()
    with pytest.raises(NotAPipe):
        OwnerPipe(other)
    assert os.get_blocking(other), "the user's terminal stays as it is"
    os.close(terminal)
    os.close(other)


def test_processes_that_are_started_later_do_not_inherit_the_pipe() -> None:
    script = """
import os, subprocess
from holdfast_service.embedded_cluster.owner_pipe import OwnerPipe
pipe = OwnerPipe.moved_from_stdin()
assert not pipe.owner_has_ended()
shown = subprocess.run(["readlink", "/proc/self/fd/0"], capture_output=True, text=True)
assert shown.stdout == "/dev/null\\n", shown
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE)
    assert process.wait(DEADLINE_S) == 0
    assert process.stdin is not None
    process.stdin.close()


def test_the_end_of_its_owner_asks_the_keeper_to_stop() -> None:
    script = """
import os, select
from holdfast_service.embedded_cluster.keeper import StopRequest
from holdfast_service.embedded_cluster.owner_pipe import OwnerPipe
read, write = os.pipe()
stop_request = StopRequest(OwnerPipe(read))
assert not stop_request.requested
assert not select.select(stop_request.wakeups, [], [], 0)[0]
os.close(write)
assert select.select(stop_request.wakeups, [], [], 5)[0]
assert stop_request.requested
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
