"""Two API servers admit jobs at once: no node is used twice, and every job gets its turn."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import select
from tests.support.service.fake_cluster import FakeCluster
from tests.support.service.job_drives import JOB, reconciling, until, until_state
from tests.support.service.node_rows import change_node, too_small

from holdfast_service.job_model.lifecycle import State
from holdfast_service.job_model.supervisor_protocol import (
    Capacity,
    ClusterUnavailable,
    JobPlan,
)
from holdfast_service.policy.quarantine import NodeStanding, cordoned_only
from holdfast_service.services.jobs import JobService
from holdfast_service.settings import Settings
from holdfast_service.store.engine import Store
from holdfast_service.store.models import Event

SUBMITTED_AT_ONCE = 12
NODES = 3
SMALL_NODE, IN_QUARANTINE = "node1", "node2"
MANY_THREADS = 100
"""More than the small node allows."""


class PlacingCluster(FakeCluster):
    """Three nodes of one CPU, on which jobs take their places when they start. Every tenth look at
    it fails."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.rng = rng
        self.placed: dict[str, list[str]] = {}
        """The nodes of each job that has a supervisor."""
        self.without_room: list[str] = []
        self.all_in_use = 0
        """How often a start has taken the last free node."""

    async def capacity(self) -> Capacity:
        if self.rng.random() < 0.1:
            raise ClusterUnavailable("no head answers")
        return replace(await super().capacity(), placed=dict(self.placed))

    async def ensure_supervisor(self, launch: JobPlan) -> bool:
        created = await super().ensure_supervisor(launch)
        if created:
            taken = {node for nodes in self.placed.values() for node in nodes}
            taken |= {*launch.reserved, *cordoned_only(launch.avoid)}
            free = [node.node_id for node in self.nodes.nodes if node.node_id not in taken]
            free.sort(key=lambda node: (node in launch.given, node in launch.avoid))
            wanted = launch.spec.parallel.dp_shard
            if len(free) < wanted:
                self.without_room.append(f"{launch.job_id}: {wanted} of {free}")
            self.placed[launch.job_id] = free[:wanted]
            self.all_in_use += len(free) == wanted
        return created

    async def release(self, job_id: str) -> bool:
        self.placed.pop(job_id, None)
        return await super().release(job_id)


def document(number: int, nodes: int, threads: int = 1) -> dict[str, Any]:
    return {
        **JOB,
        "name": f"job-{number}",
        "parallel": {"dp_shard": nodes},
        "resources": {
            "workers_per_node": 1,
            "standby_nodes": 0,
            "cpus_per_worker": 1,
            "threads_per_worker": threads,
        },
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "arrivals", [pytest.param(30), pytest.param(1_000, marks=[pytest.mark.soak])]
)
@pytest.mark.timeout(1_800)
async def test_two_servers_never_place_two_jobs_on_one_node_nor_let_a_job_pass_an_overdue_one(
    settings: Settings, arrivals: int
) -> None:
    """One of the servers starts again and again. A node is in quarantine, one is too small for some
    jobs, and the oldest job can never start."""
    rng = random.Random(arrivals)
    quick = settings.model_copy(update={"reserve_after_s": 0.5})
    cluster = PlacingCluster(rng)
    first, second = await Store.open(quick), await Store.open(quick)
    ended: list[str] = []
    needed: dict[str, int] = {}
    submitted_at: dict[str, float] = {}
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
            nodes = rng.choice((1, 1, 2, 3))
            threads = MANY_THREADS if nodes < NODES and rng.random() < 0.3 else 1
            job, _ = await rng.choice(services).submit(document(number, nodes, threads))
            needed[job.id], submitted_at[job.id] = nodes, job.created_at

    async def restart_server() -> None:
        while len(ended) < arrivals:
            async with reconciling(second, cluster, quick):
                await asyncio.sleep(0.5)

    began = time.monotonic()
    try:
        async with reconciling(first, cluster, quick):
            await change_node(first, IN_QUARANTINE, state=NodeStanding.QUARANTINED, reason="hangs")
            await too_small(first, SMALL_NODE, tasks=50)
            jobs = JobService(first, cluster, quick)
            impossible, _ = await jobs.submit(document(-1, NODES, MANY_THREADS))
            await asyncio.gather(run_jobs(), submit_jobs(), restart_server())
            await until(lambda: not cluster.placed, 60.0, "the last release")
            await jobs.cancel(impossible.id)
            await until_state(jobs, impossible.id, State.CANCELLED)
        waits_since, started_at = await times(first)
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
    overdue_at = {
        job: max(at + quick.reserve_after_s, waits_since.get(job, started_at[job]))
        for job, at in submitted_at.items()
    }
    late = [job for job in needed if needed[job] == NODES and started_at[job] > overdue_at[job]]
    assert late, "no job of all nodes was overdue"
    assert passes(needed, overdue_at, started_at) == []


def passes(
    needed: dict[str, int], overdue_at: dict[str, float], started_at: dict[str, float]
) -> list[tuple[str, str]]:
    """(job, the first overdue job before it, which needs all nodes and waits when it starts)."""
    found = []
    for job, at in started_at.items():
        before = (each for each in sorted(needed) if each < job)
        waiting = (each for each in before if overdue_at[each] < at < started_at[each])
        first = next(waiting, None)
        if first is not None and needed[first] == NODES:
            found.append((job, first))
    return found


async def times(store: Store) -> tuple[dict[str, float], dict[str, float]]:
    """When each job was first tried without success, and when it started."""
    async with store.read() as session:
        events = list(await session.scalars(select(Event).order_by(Event.at.desc())))
    started = {e.job_id: e.at for e in events if e.data.get("to") == State.STARTING}
    return {e.job_id: e.at for e in events if e.kind == "waiting"}, started
