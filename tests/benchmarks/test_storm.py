"""The storm benchmark leaves no processes or files of torchft behind, also if that cannot begin."""

from __future__ import annotations

import tempfile
from pathlib import Path

import psutil
import pytest
from benchmarks.conditions import BenchmarkFailed

from benchmarks import storm

HANGS = """#!/bin/sh
sleep 600 &
echo $! > {pid_file}
exit 1
"""


@pytest.mark.slow
def test_a_failing_side_is_killed_with_what_it_started_and_its_folder_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, pid_file, scratch = tmp_path / "python", tmp_path / "pid", tmp_path / "scratch"
    program.write_text(HANGS.format(pid_file=pid_file))
    program.chmod(0o700)
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    with pytest.raises(BenchmarkFailed, match="no lighthouse"):
        storm.torchft(str(program), 3.0, storm.Storms())
    child = int(pid_file.read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    assert list(scratch.iterdir()) == []
