"""A server is lost with its data directory; the next one has a backup, and its jobs run on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.end_to_end.conftest import ONE_NODE, Product, served, spec

pytestmark = [pytest.mark.cluster, pytest.mark.chaos, pytest.mark.soak, pytest.mark.timeout(240)]
TRAIN = {"steps": 100_000, "global_batch": 8, "micro_batch": 2}


def holdfast(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "holdfast", *arguments], check=True, timeout=60)


def test_a_running_job_is_adopted_by_a_server_with_a_restored_database(tmp_path: Path) -> None:
    file = str(tmp_path / "one.backup")
    (tmp_path / "lost").mkdir()
    with served(tmp_path / "lost") as lost:
        job = lost.client.submit(spec(**ONE_NODE, train=TRAIN))
        lost.wait_step(job.id, 10)
        holdfast("backup", file, "--data-dir", str(lost.data_dir))
        lost.kill()
        (supervisor,) = lost.actor_pids("SupervisorActor")
        restored = Product(tmp_path / "restored", beside=lost.cluster)
        holdfast("restore", file, "--data-dir", str(restored.data_dir))
        restored.start()
        try:
            assert lost.actor_pids("SupervisorActor") == [supervisor]
            restored.wait_step(job.id, (restored.client.get(job.id).progress.step or 0) + 10)
            restored.client.cancel(job.id)
            assert restored.finish(job.id).state == "CANCELLED"
            assert len(restored.client.attempts(job.id)) == 1
            assert not restored.client.incidents(job.id)
            restored.wait(lambda: not lost.left_of(job.id))
        finally:
            restored.stop()
