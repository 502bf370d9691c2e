"""Two API servers admit jobs at once: no node is used twice, and every job gets its turn."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import replace
from typing import Any

import pytest
from tests.support.service.fake_cluster import FakeCluster
from tests.support.service.job_drives import JOB, reconciling, until

from holdfast_service.job_model.supervisor_protocol import Capacity, JobLaunch
from holdfast_service.services.jobs import JobService
from holdfast_service.settings import Settings
from holdfast_service.store.engine import Store

SUBMITTED_AT_ONCE = 12


class PlacingCluster(FakeCluster):
    """Three nodes of one CPU, on which jobs take their places when they start."""

    def __init__(self) -> None:
        super().__init__()
        self.placed: dict[str, list[str]] = {}
        """The nodes of each job that has a supervisor."""
        self.without_room: list[str] = []
        self.all_in_use = 0
        """How often a start has taken the last free node."""

    async def capacity(self) -> Capacity:
        return replace(await super().capacity(), placed=dict(self.placed))

    async def ensure_supervisor(self, launch: JobLaunch) -> bool:
        created = await super().ensure_supervisor(launch)
        if created:
            taken = {node for nodes in self.placed.values() for node in nodes}
            taken |= set(launch.reserved)
            free = [node.node_id for node in self.nodes.nodes if node.node_id not in taken]
            wanted = launch.spec["parallel"]["dp_shard"]
            if len(free) < wanted:
                self.without_room.append(f"{launch.job_id}: {wanted} of {free}")
            self.placed[launch.job_id] = free[:wanted]
            self.all_in_use += len(free) == wanted
        return created

    async def release(self, job_id: str) -> bool:
        self.placed.pop(job_id, None)
        return await super().release(job_id)


def document(number: int, nodes: int) -> dict[str, Any]:
    return {
        **JOB,
        "name": f"job-{number}",
        "parallel": {"dp_shard": nodes},
        "resources": {"workers_per_node": 1, "standby_nodes": 0, "cpus_per_worker": 1},
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "arrivals", [pytest.param(30), pytest.param(1_000, marks=[pytest.mark.soak])]
)
@pytest.mark.timeout(1_800)
async def test_two_servers_never_place_two_jobs_on_one_node(
    settings: Settings, arrivals: int
) -> None:
    rng = random.Random(arrivals)
    quick = settings.model_copy(update={"queue_retry_s": 0.05, "reserve_after_s": 2.0})
    cluster = PlacingCluster()
    first, second = await Store.open(quick), await Store.open(quick)
    ended: list[str] = []
    room = asyncio.Semaphore(SUBMITTED_AT_ONCE)

    async def run_jobs() -> None:
        """Jobs end soon after they have started."""
        while len(ended) < arrivals:
            for job_id, supervisor in list(cluster.supervisors.items()):
                if supervisor.attempt == 0 and rng.random() < 0.5:
                    supervisor.form(1)
                    supervisor.run(1, 1, 2)
                    supervisor.end()
                    ended.append(job_id)
                    room.release()
            await asyncio.sleep(0.02)

    async def submit_jobs() -> None:
        services = [JobService(store, cluster, quick) for store in (first, second)]
        for number in range(arrivals):
            await room.acquire()
            await rng.choice(services).submit(document(number, rng.choice((1, 1, 2, 3))))

    began = time.monotonic()
    try:
        async with reconciling(first, cluster, quick), reconciling(second, cluster, quick):
            await asyncio.gather(run_jobs(), submit_jobs())
            await until(lambda: not cluster.placed, 60.0, "the last release")
    finally:
        await first.close()
        await second.close()
    passed_s = time.monotonic() - began
    print(
        f"{len(ended)} jobs in {passed_s:.0f} s, seed {arrivals}; {cluster.all_in_use} took the "
        f"last free node; without room: {cluster.without_room}"
    )
    assert cluster.without_room == []
    assert len(set(ended)) == arrivals
    assert cluster.all_in_use > arrivals / 10, "nodes were left idle"
