"""Savers that hang, as on a mount whose server is gone: real processes, killed by their agent."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from tests.support.nodes.agent_config import agent_config
from tests.support.waiting import eventually

from holdfast_workers.agent.remote_saves import RemoteSaves
from holdfast_workers.agent.signal_sender import SignalSender
from holdfast_workers.ipc.children import Child
from holdfast_workers.ipc.io_loop import NodeIO
from holdfast_workers.ipc.linux_processes import ProcessEnd
from holdfast_workers.protocol.processes import FrozenCopy
from holdfast_workers.protocol.signals import ShardDelayed, Signal


class HangingSavers:
    """Forks processes that never end; passes their exits to `saves`."""

    def __init__(self) -> None:
        self.forked: list[subprocess.Popen[bytes]] = []
        self.saves: RemoteSaves

    def fork(self, name: str, job: FrozenCopy) -> Child:
        ours, theirs = socket.socketpair()
        reader, writer = os.pipe()
        process = subprocess.Popen(["sleep", "600"], stdout=writer, start_new_session=True)
        theirs.close()
        os.close(writer)
        self.forked.append(process)
        return Child(job, name, process.pid, os.pidfd_open(process.pid), ours, reader)

    def on_child_exit(self, child: Child, end: ProcessEnd) -> None:
        assert isinstance(child.job, FrozenCopy)
        self.saves.on_exit(child.job, end)


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[Callable[[float], tuple[HangingSavers, list[Signal]]]]:
    """`hanging(save_timeout_s)`: a node whose savers all hang, and the signals that it sends."""
    child_processes, signals = HangingSavers(), list[Signal]()
    io = NodeIO(cast(Any, child_processes))

    def start(save_timeout_s: float) -> tuple[HangingSavers, list[Signal]]:
        config = agent_config(tmp_path, timeouts={"save_s": save_timeout_s})
        sender = SignalSender("n0", "life", signals.append)
        child_processes.saves = RemoteSaves(config, tmp_path, cast(Any, child_processes), sender)
        io.start()
        child_processes.saves.start(io)
        return child_processes, signals

    yield start
    child_processes.saves.stop()
    for process in child_processes.forked:
        process.kill()
    eventually(
        lambda: all(not Path(f"/proc/{process.pid}").exists() for process in child_processes.forked)
    )
    io.stop()


def _hand_over(saves: RemoteSaves, folder: Path) -> Path:
    path = folder / "save-copy.seg"
    path.write_bytes(bytes(100))
    saves.take_over(FrozenCopy(str(path), rank=0, attempt=1, step=5))
    return path


def test_a_hanging_saver_is_killed_reported_as_refused_and_its_copy_is_retried(
    hanging: Callable[[float], tuple[HangingSavers, list[Signal]]], tmp_path: Path
) -> None:
    node, signals = hanging(0.05)
    path = _hand_over(node.saves, tmp_path)
    eventually(lambda: len(node.forked) >= 2)
    assert signals  # others follow: each further saver hangs too
    for delayed in [signal.detail for signal in tuple(signals)]:
        assert isinstance(delayed, ShardDelayed) and "hang" in delayed.message
    assert path.exists()


@pytest.fixture
def frozen() -> Iterator[Callable[[int, bool], None]]:
    """`frozen(pid, on)` makes a process unkillable as long as it is on: like one that waits in the
    kernel for a dead mount, it takes no signal."""
    group = Path("/sys/fs/cgroup/freezer") / f"holdfast-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no freezer cgroup can be made here: {error}")

    def switch(pid: int, on: bool) -> None:
        with contextlib.suppress(ProcessLookupError):
            (group / "cgroup.procs").write_text(str(pid))
        (group / "freezer.state").write_text("FROZEN" if on else "THAWED")

    yield switch
    (group / "freezer.state").write_text("THAWED")
    eventually(lambda: not (group / "cgroup.procs").read_text())
    group.rmdir()


@pytest.mark.seconds
def test_a_saver_that_cannot_be_killed_is_reported_and_retried_when_its_mount_answers(
    hanging: Callable[[float], tuple[HangingSavers, list[Signal]]],
    frozen: Callable[[int, bool], None],
    tmp_path: Path,
) -> None:
    node, signals = hanging(1.0)
    path = _hand_over(node.saves, tmp_path)
    eventually(lambda: len(node.forked) == 1)
    stuck = node.forked[0].pid
    frozen(stuck, True)
    eventually(lambda: len(signals) == 1)
    (delayed,) = (signal.detail for signal in signals)
    assert isinstance(delayed, ShardDelayed) and "hang" in delayed.message
    assert node.saves.saving == ((0, 1, 5),)
    assert len(node.forked) == 1  # a second saver would wait for the same mount
    assert Path(f"/proc/{stuck}").exists()
    frozen(stuck, False)
    eventually(lambda: len(node.forked) == 2)
    assert path.exists()
    assert len(signals) == 1  # the outage is known


def test_a_saver_is_not_killed_before_its_deadline(
    hanging: Callable[[float], tuple[HangingSavers, list[Signal]]], tmp_path: Path
) -> None:
    node, signals = hanging(600.0)
    _hand_over(node.saves, tmp_path)
    eventually(lambda: len(node.forked) == 1)
    assert node.forked[0].poll() is None
    assert signals == []
