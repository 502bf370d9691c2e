"""The nodes that jobs lack, as read from the store: elastic jobs do not grow on them meanwhile."""

from __future__ import annotations

import time
from dataclasses import replace

from tests.support.service.fake_cluster import FakeCluster
from tests.support.service.job_drives import JOB, reconciling, submitted, until, until_state

from holdfast_service.job_model.admission import LackedNodes
from holdfast_service.job_model.lifecycle import State
from holdfast_service.job_model.supervisor_protocol import Capacity, Phase
from holdfast_service.reconcile.cluster_demand import CompetingDemand
from holdfast_service.services.jobs import JobService
from holdfast_service.settings import Settings
from holdfast_service.store.engine import Store

ALL = {"node0", "node1", "node2"}


async def lack(store: Store, settings: Settings, capacity: Capacity) -> frozenset[str]:
    async with store.read() as session:
        demand = await CompetingDemand(settings).of_all_jobs(session, time.time())
    return LackedNodes(capacity, {}, demand.unsettled).beside("another")


async def test_a_started_job_lacks_nodes_until_it_is_placed_and_when_it_has_lost_one(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    async def lacking(*nodes: str) -> frozenset[str]:
        placed = {supervisor.launch.job_id: nodes} if nodes else {}
        return await lack(store, settings, replace(cluster.nodes, placed=placed))

    async with reconciling(store, cluster, settings):
        supervisor = await submitted(jobs, cluster)
        job = supervisor.launch.job_id
        assert await lacking() == ALL
        assert await lacking("node0", "node1", "node2") == set()
        supervisor.form(1)
        supervisor.enter(Phase.RUNNING)
        await until_state(jobs, job, State.RUNNING)
        assert await lacking("node0", "node1") == set(), "a standby is not needed to train"
        supervisor.enter(Phase.RECOVERING)
        await until_state(jobs, job, State.RECOVERING)
        assert await lacking("node0", "node1") == ALL


async def test_a_queued_job_lacks_nodes_only_if_the_cluster_is_large_enough(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    async with reconciling(store, cluster, settings):
        first = await submitted(jobs, cluster)
        cluster.nodes = replace(
            cluster.nodes, placed={first.launch.job_id: ("node0", "node1", "node2")}
        )
        second, _ = await jobs.submit({**JOB, "name": "second"})

        async def waits() -> bool:
            return bool((await jobs.get(second.id)).waiting)

        await until(waits, what="the reason to wait")
        assert await lack(store, settings, cluster.nodes) == ALL
        too_small = replace(cluster.nodes, nodes=cluster.nodes.nodes[:2])
        assert await lack(store, settings, too_small) == set()
