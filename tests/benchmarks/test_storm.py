"""The storm benchmark leaves no processes or files behind, even if the other side hangs."""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from pathlib import Path

import psutil
import pytest
from tests.support.waiting import eventually

from benchmarks import storm

HANGS = """#!/bin/sh
sleep 600 &
echo $! > {pid_file}.partial
mv {pid_file}.partial {pid_file}
wait
"""
WAIT_S = 60.0


@pytest.mark.slow
def test_a_hanging_side_is_killed_with_its_replicas_and_its_folder_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, pid_file, scratch = tmp_path / "python", tmp_path / "pid", tmp_path / "scratch"
    program.write_text(HANGS.format(pid_file=pid_file))
    program.chmod(0o700)
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.setattr(storm, "SLACK_S", 3.0)
    options = argparse.Namespace(calm_steps=0, step_s=1.0, torchft_s=0.0, seed=1)
    with pytest.raises(subprocess.TimeoutExpired):
        storm._torchft(str(program), 3.0, options, {"5": 5.5})
    replica = int(pid_file.read_text())
    eventually(lambda: not _runs(replica), WAIT_S, "a replica is still running")
    assert list(scratch.iterdir()) == []


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
