"""Savers that hang, as on a mount whose server is gone: real processes, killed by their node."""

from __future__ import annotations

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
from holdfast_workers.agent.signal_sender import Teller
from holdfast_workers.ipc.children import Child
from holdfast_workers.ipc.io_loop import NodeIO
from holdfast_workers.protocol.messages import Signal, SignalKind


class Hanging:
    """Forks what never comes to an end; hands what its processes do to `saves`."""

    def __init__(self) -> None:
        self.forked: list[subprocess.Popen[bytes]] = []
        self.saves: RemoteSaves

    def fork(self, kind: str, name: str, request: dict[str, Any]) -> Child:
        ours, theirs = socket.socketpair()
        reader, writer = os.pipe()
        process = subprocess.Popen(["sleep", "600"], stdout=writer, start_new_session=True)
        theirs.close()
        os.close(writer)
        self.forked.append(process)
        return Child(kind, name, process.pid, os.pidfd_open(process.pid), ours, reader, request)

    def child_exited(self, child: Child, detail: dict[str, int | str]) -> None:
        self.saves.exited(child, detail)


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[Callable[[float], tuple[Hanging, list[Signal]]]]:
    """`hanging(save_timeout_s)`: a node whose savers all hang, and what it tells."""
    brood, signals = Hanging(), list[Signal]()
    io = NodeIO(cast(Any, brood))

    def start(save_timeout_s: float) -> tuple[Hanging, list[Signal]]:
        config = agent_config(tmp_path, save_timeout_s=save_timeout_s)
        teller = Teller("n0", "life", signals.append)
        brood.saves = RemoteSaves(config, tmp_path, cast(Any, brood), teller)
        io.start()
        brood.saves.start(io)
        return brood, signals

    yield start
    brood.saves.stop()
    for process in brood.forked:
        process.kill()
    eventually(lambda: all(not Path(f"/proc/{one.pid}").exists() for one in brood.forked))
    io.stop()


def _hand_over(saves: RemoteSaves, folder: Path) -> Path:
    path = folder / "save-copy.seg"
    path.write_bytes(bytes(100))
    saves.hand_over({"path": str(path), "rank": 0, "attempt": 1, "step": 5, "metrics": {}})
    return path


def test_a_saver_that_hangs_is_killed_told_as_a_refusal_and_its_copy_tried_again(
    hanging: Callable[[float], tuple[Hanging, list[Signal]]], tmp_path: Path
) -> None:
    node, signals = hanging(0.05)
    path = _hand_over(node.saves, tmp_path)
    eventually(lambda: len(node.forked) >= 2)
    assert [one.kind for one in signals] == [SignalKind.SHARD_DELAYED]
    assert "hang" in signals[0].detail["message"]
    assert path.exists()


def test_a_saver_has_as_long_as_its_deadline_says(
    hanging: Callable[[float], tuple[Hanging, list[Signal]]], tmp_path: Path
) -> None:
    node, signals = hanging(600.0)
    _hand_over(node.saves, tmp_path)
    eventually(lambda: len(node.forked) == 1)
    assert node.forked[0].poll() is None
    assert signals == []
