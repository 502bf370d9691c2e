"""`TorchTrainer(...).fit()` of the example runs as a job, and loses a rank on the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.end_to_end.conftest import REPOSITORY, Product, served

pytestmark = [pytest.mark.cluster, pytest.mark.chaos, pytest.mark.timeout(240)]
EXAMPLE = REPOSITORY / "examples" / "ray_train" / "train.py"
EPOCHS = 200


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    with served(tmp_path_factory.mktemp("product"), nodes=2) as started:
        yield started


def test_fit_of_the_example_runs_a_job_that_outlives_a_rank(
    two_nodes: Product, tmp_path: Path
) -> None:
    client = two_nodes.client
    process = subprocess.Popen(
        [sys.executable, str(EXAMPLE), "--epochs", str(EPOCHS), "--storage", str(tmp_path)],
        env={**os.environ, "HOLDFAST_ADDRESS": client.address},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        two_nodes.wait(lambda: bool(list(client.list())), 60)
        (job,) = client.list()
        two_nodes.wait_step(job.id, 20)
        pid = two_nodes.members(job.id)[1].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        output, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, output
    assert f"checkpoint_{EPOCHS:06d}" in output.splitlines()[-1]
    ended = client.get(job.id)
    assert (ended.state, ended.progress.step) == ("SUCCEEDED", EPOCHS), ended.outcome
    assert len(client.attempts(job.id)) == 2
    (run,) = tmp_path.iterdir()
    assert len(list(run.glob("checkpoint_*"))) == 2
