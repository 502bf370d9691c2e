"""The tests' collection makes no search for garbage; the tests do, in every process of a run."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLUGIN = """
import gc

def pytest_sessionfinish(session):
    if not hasattr(session.config, "workerinput"):
        print("the controller collects garbage:", gc.isenabled())
"""


def test_garbage_is_collected_while_tests_run() -> None:
    assert gc.isenabled()


@pytest.mark.slow
def test_garbage_is_collected_in_the_controller_of_several_processes(tmp_path: Path) -> None:
    (tmp_path / "garbage_report.py").write_text(PLUGIN)
    test = f"{__file__}::{test_garbage_is_collected_while_tests_run.__name__}"
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-s", "-n", "1", "-p", "garbage_report", test],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "the controller collects garbage: True" in ran.stdout
