"""A cluster stored in a folder: it outlives the process that drives it, which tests can kill.

A supervisor is a file. Its report depends on the job only: 20 steps and the end at once, or, for a
job named `endless`, 20 steps and no end until the job is cancelled or paused; after a resume, 20
more steps and the end.

`serve` is a reconciler over it; it dies at the crash point in its settings.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from uuid import uuid4

from tests.support.service.fake_cluster import FakeCluster, FakeSupervisor, three_nodes

from holdfast_service.job_model.job_spec import JobSpec
from holdfast_service.job_model.supervisor_protocol import (
    JobPlan,
    Phase,
    StopKind,
    StopOrder,
    SupervisorUnavailable,
)
from holdfast_service.reconcile.reconciler import Reconciler
from holdfast_service.settings import Settings
from holdfast_service.store.engine import Store

STEPS = 20


class DurableCluster(FakeCluster):
    """`FakeCluster` on files, with room for every job; `started()` lists created supervisors."""

    def __init__(self, folder: Path) -> None:
        super().__init__(three_nodes(roomy=True))
        self._folder = folder

    async def ensure_supervisor(self, launch: JobPlan) -> bool:
        try:
            with self._file(launch.job_id).open("x") as file:
                json.dump([launch.spec.name, launch.last_event, launch.last_attempt], file)
        except FileExistsError:
            return False
        # O_APPEND: lines of several processes do not mix.
        journal = os.open(self._folder / "starts", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        os.write(journal, f"{launch.job_id}\n".encode())
        os.close(journal)
        return True

    def _supervisor(self, job_id: str) -> FakeSupervisor:
        name, last_event, last_attempt = self._present(job_id)
        launch = JobPlan(job_id, JobSpec(name=name), "", last_event, last_attempt)
        supervisor = FakeSupervisor(launch, rows_per_poll=7)
        supervisor.form(last_attempt + 1, restore_step=last_attempt * STEPS)
        supervisor.enter(Phase.RUNNING)
        supervisor.run(last_attempt + 1, last_attempt * STEPS + 1, (last_attempt + 1) * STEPS)
        order = self._order(job_id)
        if order.exists():
            supervisor.stop(StopOrder(StopKind(order.read_text()), "requested", 0.0))
        elif name != "endless" or last_attempt:
            supervisor.end()
        return supervisor

    async def stop(self, job_id: str, order: StopOrder) -> None:
        self._present(job_id)
        fresh = self._folder / f"{uuid4()}.new"
        fresh.write_text(order.kind.value)
        fresh.rename(self._order(job_id))

    async def release(self, job_id: str) -> bool:
        self._order(job_id).unlink(missing_ok=True)
        self._file(job_id).unlink(missing_ok=True)
        return True

    async def jobs_present(self) -> set[str]:
        return {path.stem for path in self._folder.glob("*.job")}

    def started(self) -> list[str]:
        journal = self._folder / "starts"
        return journal.read_text().split() if journal.exists() else []

    def _file(self, job_id: str) -> Path:
        return self._folder / f"{job_id}.job"

    def _order(self, job_id: str) -> Path:
        return self._folder / f"{job_id}.stop"

    def _present(self, job_id: str) -> tuple[str, int, int]:
        if not self._file(job_id).exists():
            raise SupervisorUnavailable(job_id)
        name, last_event, last_attempt = json.loads(self._file(job_id).read_text())
        return name, last_event, last_attempt


async def serve(settings: Settings, folder: Path) -> None:
    store = await Store.open(settings)
    await Reconciler(store, DurableCluster(folder), settings).run(asyncio.Event())
