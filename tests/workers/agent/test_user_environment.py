"""The environment of users' code: real agents, zygotes and ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.nodes.supervised import supervised

from holdfast_workers.ipc.environment import PASSED_ON_VARIABLE
from holdfast_workers.spec import ParallelSpec, TrainingSpec, TrainSpec

pytestmark = pytest.mark.chaos
ONE_RANK = TrainingSpec(
    function="tests.support.ranks.functions:shows_environment",
    train=TrainSpec(steps=2, global_batch=8, micro_batch=8),
    parallel=ParallelSpec(),
)


def test_users_code_sees_the_jobs_variables_and_no_secret_of_its_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_PASSWORD", "planted-word")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "planted-word")
    monkeypatch.setenv("HOLDFAST_WEBHOOK_SECRET", "planted-word")
    monkeypatch.setenv("HOLDFAST_TEST_NAMED", "by the operator")
    job_env = {"GREETING": "hello = world\nüñí", "PATH": "/jobs/own:/usr/bin:/bin"}
    with supervised(tmp_path, ONE_RANK, standbys=0, workers_per_node=1, job_env=job_env) as run:
        assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
    shown = "\n".join(run.logs)
    assert "planted-word" not in shown
    assert "variable GREETING=hello = world\nüñí" in shown
    assert "variable PATH=/jobs/own:" in shown
    assert "variable HOLDFAST_TEST_NAMED=by the operator" in shown
    assert PASSED_ON_VARIABLE not in shown


def test_users_code_is_found_by_the_processes_that_run_it(tmp_path: Path) -> None:
    """In its own folder, and after all that Holdfast imports."""
    code = tmp_path / "code"
    code.mkdir()
    (code / "mine.py").write_text(
        "from pathlib import Path\n"
        "import subprocess, sys\n"
        "from tests.support.ranks.functions import plain\n"
        "def main(ctx):\n"
        "    print('here', Path.cwd())\n"
        "    subprocess.run([sys.executable, '-c', 'import other'], check=True)\n"
        "    plain(ctx)\n"
    )
    (code / "other.py").write_text("print('there', __file__)\n")
    (code / "structlog.py").write_text("raise RuntimeError('a module of the user')\n")
    job = ONE_RANK.model_copy(update={"function": "mine:main"})
    with supervised(tmp_path, job, standbys=0, workers_per_node=1, code=str(code)) as run:
        assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
    shown = "\n".join(run.logs)
    assert f"here {code}\n" in shown and f"there {code / 'other.py'}\n" in shown
