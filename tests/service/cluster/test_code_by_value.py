"""What a job left on a node is removed there, also where Holdfast is not installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast_service.cluster.code_by_value import sweep_this_node
from holdfast_workers.memory.node_folder import BASE_VARIABLE, memory_base

PROGRAM = """
import pickle, sys
sweep = pickle.load(sys.stdin.buffer)
sweep("mine")
sweep("never-there")
assert not any(name.startswith("holdfast") for name in sys.modules), "imported"
"""


def test_the_sweep_runs_without_holdfast_and_takes_only_its_folders(tmp_path: Path) -> None:
    import ray  # late: it takes a second

    from holdfast_service.cluster import code_by_value

    for name in ("mine", "of-another-job"):
        (tmp_path / name / "n0").mkdir(parents=True)
        (tmp_path / name / "n0" / "own-0.seg").write_bytes(b"state")
    ray.cloudpickle.register_pickle_by_value(code_by_value)
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=ray.cloudpickle.dumps(sweep_this_node),
        env={**os.environ, BASE_VARIABLE: str(tmp_path)},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr.decode()
    assert [path.name for path in tmp_path.iterdir()] == ["of-another-job"]


def test_it_sweeps_where_agents_keep_their_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(BASE_VARIABLE, raising=False)
    left = memory_base(os.environ) / "job-of-test-node-sweep"
    left.mkdir(parents=True)
    try:
        sweep_this_node(left.name)
        assert not left.exists()
    finally:
        if left.exists():
            left.rmdir()
