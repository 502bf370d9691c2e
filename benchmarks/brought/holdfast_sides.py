"""Holdfast's sides: the same files as jobs of one server, through `serve` and REST."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.brought.stock_sides import FUNCTION, USERS_FOLDER, function_config, script_line
from benchmarks.holdfast_side import RunningServer, submitted
from benchmarks.step_files import StepFiles, scratch

MANY = 1000
"""More failures than a benchmark causes."""

GRACE_S = 2.0
"""After the last kill nothing is saved any more."""


@contextlib.contextmanager
def script(server: RunningServer, ranks: int) -> Iterator[StepFiles]:
    """The script, level 0: its own checkpoint file."""
    with scratch() as (_, folder):
        line = [Path(script_line(folder)[0]).name, *script_line(folder)[1:]]
        with _running(server, folder, {**_job(ranks, memory=0), "script": line}) as run:
            yield run


@contextlib.contextmanager
def ray_train(server: RunningServer, ranks: int, level: int) -> Iterator[StepFiles]:
    """The Ray Train function. Level 0: checkpoints on disk alone; level 2: in memory too."""
    with scratch() as (_, folder):
        job = {
            **_job(ranks, memory=1 if level == 2 else 0),
            "ray_train": FUNCTION,
            "config": function_config(folder / "steps"),
            "ray_run": {"storage_path": str(folder / "storage"), "name": "run", "num_to_keep": 2},
        }
        with _running(server, folder, job) as run:
            yield run


def _job(ranks: int, memory: int) -> dict[str, Any]:
    return {
        "name": "bring-benchmark",
        "code": str(USERS_FOLDER),
        "parallel": {"dp_shard": ranks},
        "resources": {"cpus_per_worker": 0.5, "workers_per_node": 1},
        "checkpoint": {"memory": {"every_steps": memory}, "remote": {"every_steps": 0}},
        "recovery": {"max_failures": MANY},
        "program": {"grace_s": GRACE_S},
    }


@contextlib.contextmanager
def _running(server: RunningServer, folder: Path, job: dict[str, Any]) -> Iterator[StepFiles]:
    with submitted(server, job) as running:

        def why_ended() -> str:
            found = running.client.get(running.id)
            if not found.state.terminal:
                return ""
            return f"{found.state.value}: {found.outcome}"

        yield StepFiles(folder / "steps", why_ended)
