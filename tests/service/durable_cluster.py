"""A cluster in a folder: it outlives the process that drives it, so that process can be killed.

A supervisor is a file. What it reports follows from the job alone: 20 steps and the end at once,
or, for a job named `endless`, 20 steps and no end until it is cancelled.

Run as a program, this module is a reconciler that may be told to die at a crossing:
`python -m tests.service.durable_cluster <settings as JSON> <folder>`.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from tests.service.fake_cluster import FakeSupervisor, three_nodes

from holdfast_service.reconciler import Reconciler
from holdfast_service.reports import (
    Capacity,
    Cursors,
    JobLaunch,
    Phase,
    SupervisorReport,
    SupervisorUnavailable,
)
from holdfast_service.settings import Settings
from holdfast_service.store.engine import Store

STEPS = 20


class DurableCluster:
    """Implements reports.Cluster on files; `starts` tells how often each supervisor was made."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def capacity(self) -> Capacity:
        return three_nodes(can_grow=True)

    async def ensure_supervisor(self, launch: JobLaunch) -> bool:
        try:
            with self._file(launch.job_id).open("x") as file:
                file.write(launch.name)
        except FileExistsError:
            return False
        # O_APPEND: lines of several processes do not mix.
        journal = os.open(self._folder / "starts", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        os.write(journal, f"{launch.job_id}\n".encode())
        os.close(journal)
        return True

    async def poll(self, job_id: str, cursors: Cursors) -> SupervisorReport:
        name = self._present(job_id)
        launch = JobLaunch(job_id=job_id, name=name, spec={}, data_dir="")
        supervisor = FakeSupervisor(launch, rows_per_poll=7)
        supervisor.form(1)
        supervisor.enter(Phase.RUNNING)
        supervisor.run(1, 1, STEPS)
        if (self._folder / f"{job_id}.cancelled").exists():
            supervisor.end("CANCELLED", "cancelled")
        elif name != "endless":
            supervisor.end()
        return supervisor.report(cursors)

    async def cancel(self, job_id: str, reason: str) -> None:
        self._present(job_id)
        (self._folder / f"{job_id}.cancelled").touch()

    async def release(self, job_id: str) -> bool:
        self._file(job_id).unlink(missing_ok=True)
        return True

    async def jobs_present(self) -> set[str]:
        return {path.stem for path in self._folder.glob("*.job")}

    def starts(self) -> list[str]:
        journal = self._folder / "starts"
        return journal.read_text().split() if journal.exists() else []

    def _file(self, job_id: str) -> Path:
        return self._folder / f"{job_id}.job"

    def _present(self, job_id: str) -> str:
        if not self._file(job_id).exists():
            raise SupervisorUnavailable(job_id)
        return self._file(job_id).read_text()


async def _serve(settings: Settings, folder: Path) -> None:
    store = await Store.open(settings)
    await Reconciler(store, DurableCluster(folder), settings).run(asyncio.Event())


if __name__ == "__main__":
    asyncio.run(_serve(Settings.model_validate_json(sys.argv[1]), Path(sys.argv[2])))
