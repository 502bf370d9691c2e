"""The keeper by itself, without Ray."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.waiting import DEADLINE_S

from holdfast_service.embedded_cluster import processes
from holdfast_service.embedded_cluster.keeper import Keeper
from holdfast_service.embedded_cluster.local_cluster import KeeperOptions, folder
from holdfast_service.embedded_cluster.node_shares import NodeShare


def test_a_node_that_fails_to_start_leaves_no_process_and_the_cluster_runs_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = folder(tmp_path)
    files.make()
    nothing: Any = None
    keeper = Keeper(files, (NodeShare(1),), KeeperOptions(orphan_grace_s=60.0), nothing)
    started: list[subprocess.Popen[bytes]] = []

    def half_start(name: str, *, head: bool) -> None:
        marks = {
            processes.CLUSTER_MARK: keeper.cluster.cluster_id,
            processes.NODE_MARK: name,
        }
        command = [sys.executable, "-c", "import time; time.sleep(60)"]
        started.append(subprocess.Popen(command, env={**os.environ, **marks}))
        raise TimeoutError("the raylet did not come up")

    monkeypatch.setattr(keeper, "_start_node", half_start)
    answer = keeper._add_node()
    assert answer == {"error": "node-0 did not start: TimeoutError: the raylet did not come up"}
    assert started[0].wait(DEADLINE_S) == -9
    assert keeper.cluster.nodes == ()
