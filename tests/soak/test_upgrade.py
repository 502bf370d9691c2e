"""Holdfast is upgraded on the disk of all nodes while jobs run on a real cluster."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.end_to_end.conftest import REPOSITORY, Product, spec

from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.main import run
from holdfast_service.embedded_cluster import local_cluster

pytestmark = [*(pytest.mark.soak, pytest.mark.cluster, pytest.mark.chaos), pytest.mark.timeout(900)]

PARTS = ("api", "service", "workers")
RESOURCES = {"cpus_per_worker": 0.25, "workers_per_node": 1, "standby_nodes": 0}


class Installation:
    """Two copies of the code, one of which is installed."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._current = folder, folder / "current"
        for name in ("former", "present"):
            for part in PARTS:
                skip = shutil.ignore_patterns("node_modules", "__pycache__")
                shutil.copytree(REPOSITORY / part, folder / name / part, ignore=skip)
        with (folder / "present" / "workers" / "holdfast_workers" / "errors.py").open("a") as file:
            file.write("# another build\n")

    def install(self, name: str) -> None:
        self._current.unlink(missing_ok=True)
        self._current.symlink_to(self._folder / name)

    @property
    def python_path(self) -> str:
        return os.pathsep.join([*(str(self._current / part) for part in PARTS), str(REPOSITORY)])


def test_jobs_train_through_an_upgrade_and_no_step_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    installation = Installation(tmp_path)
    installation.install("former")
    product = Product(tmp_path / "data", PYTHONPATH=installation.python_path)
    product.data_dir.mkdir()
    try:
        product.start()
        struck, moved = submit(product, "struck"), submit(product, "moved")
        for job in (struck, moved):
            product.wait_step(job, 20)
        former = product.client.version().build
        product.kill()  # its cluster lives on
        installation.install("present")
        product.start()
        present = product.client.version().build
        assert present != former
        at = {job: product.client.get(job).progress.step or 0 for job in (struck, moved)}
        for job, step in at.items():
            product.wait_step(job, step + 20)
            assert build_of(product, job) == former

        product.client.inject(struck, "kill", rank=1)
        product.wait(lambda: product.client.get(struck).progress.attempt == 2)
        product.wait_step(struck, (product.client.get(struck).progress.step or 0) + 20)
        assert build_of(product, struck) == former, "its agents fork the ranks"
        product.client.inject(struck, "agent_death", rank=1)
        began = time.monotonic()
        product.wait(lambda: trains_in(product, struck, present), 300)
        print(f"queued and resumed in {time.monotonic() - began:.1f} s")
        states = [e.data for e in product.client.all_events(struck) if e.kind == "job.state"]
        assert any("Holdfast was upgraded" in (data["reason"] or "") for data in states)

        monkeypatch.setenv("HOLDFAST_DATA_DIR", str(product.data_dir))
        assert run(["upgrade", "--yes"]) == ExitCode.OK
        shown = capsys.readouterr().err
        print(shown, file=sys.stderr)
        assert "0 steps lost" in shown and "1 job of 1" in shown
        assert trains_in(product, moved, present)
        for job in (struck, moved):
            product.client.cancel(job, now=True)
            product.finish(job)
            steps = [point.step for point in product.client.metrics(job, ["loss"])]
            assert steps == [*range(1, len(steps) + 1)]
    finally:
        product.stop()
        local_cluster.stop(product.data_dir)


def submit(product: Product, name: str) -> str:
    document: dict[str, Any] = spec(name=name, parallel={"dp_shard": 2}, resources=RESOURCES)
    document["train"] = {**document["train"], "steps": 20_000}
    return product.client.submit(document).id


def build_of(product: Product, job: str) -> str | None:
    return product.client.get(job).build


def trains_in(product: Product, job: str, build: str) -> bool:
    view = product.client.get(job)
    return view.state == "RUNNING" and view.build == build
