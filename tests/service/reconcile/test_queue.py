"""The queue as reconcilers drive it: no job passes one that nodes are reserved for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from tests.support.service.databases import paced
from tests.support.service.fake_cluster import FakeCluster
from tests.support.service.job_drives import (
    JOB,
    reconciling,
    submitted,
    until,
    until_waits,
)
from tests.support.service.node_rows import change_node, too_small
from tests.support.service.stores import SQLITE

from holdfast_service.crash_points import CrashPoint
from holdfast_service.job_model.supervisor_protocol import Phase, SizeOrder
from holdfast_service.policy.quarantine import NodeStanding
from holdfast_service.services.jobs import JobService
from holdfast_service.services.nodes import NodeService
from holdfast_service.settings import Settings
from holdfast_service.store.engine import Store

pytestmark = pytest.mark.parametrize("settings", [SQLITE], indirect=True)
WHOLE_NODE = {"workers_per_node": 1, "standby_nodes": 0, "cpus_per_worker": 1}
ALL = {"parallel": {"dp_shard": 3}, "resources": WHOLE_NODE}
"""A job that needs all three nodes."""
SMALL = {"parallel": {"dp_shard": 1}, "resources": WHOLE_NODE}
HALF = {"parallel": {"dp_shard": 1}, "resources": {**WHOLE_NODE, "cpus_per_worker": 0.5}}
ELASTIC = {
    "parallel": {"dp_shard": "auto"},
    "resources": {**WHOLE_NODE, "nodes": {"min": 1, "max": 3}},
}


@pytest.fixture
def at_once(settings: Settings) -> Settings:
    """Nodes are reserved for a job as soon as it has waited at all."""
    return settings.model_copy(update={"reserve_after_s": 0.0})


@pytest.fixture
def passed() -> Iterator[list[float]]:
    """The clock goes ahead by this many seconds."""
    ahead, real = [0.0], time.time
    with patch("time.time", lambda: real() + ahead[0]):
        yield ahead


async def running(jobs: JobService, cluster: FakeCluster, node: str, **spec: Any) -> str:
    """A job that has its place on that node."""
    supervisor = await submitted(jobs, cluster, **spec)
    job = supervisor.launch.job_id
    cluster.nodes = replace(cluster.nodes, placed={**cluster.nodes.placed, job: (node,)})
    return job


async def queued(jobs: JobService, **spec: Any) -> str:
    """A job that waits for nodes."""
    job, _ = await jobs.submit({**JOB, **spec})
    await until_waits(jobs, job.id, "nodes")
    return job.id


async def until_decided(jobs: JobService, cluster: FakeCluster, job: str) -> str | None:
    """Once the job has started or waits for nodes: for which job nodes are reserved; None: none."""

    async def is_decided() -> bool:
        waiting = (await jobs.get(job)).waiting
        return job in cluster.supervisors or (waiting is not None and waiting.resource == "nodes")

    await until(is_decided, what="a decision")
    assert job not in cluster.supervisors, "it has passed the job before it"
    waiting = (await jobs.get(job)).waiting
    return waiting.reserved.job if waiting is not None and waiting.reserved is not None else None


async def test_an_overdue_job_that_needs_a_node_in_quarantine_is_not_passed(
    store: Store, jobs: JobService, cluster: FakeCluster, at_once: Settings
) -> None:
    async with reconciling(store, cluster, at_once):
        await running(jobs, cluster, "node0", **SMALL)
        await change_node(store, "node2", state=NodeStanding.QUARANTINED, reason="two hangs")
        large = await queued(jobs, **ALL)
        small, _ = await jobs.submit({**JOB, **SMALL, "name": "small"})
        assert await until_decided(jobs, cluster, small.id) == large


async def test_a_node_that_is_too_small_for_one_job_is_still_kept_for_the_job_before_it(
    store: Store, jobs: JobService, cluster: FakeCluster, at_once: Settings
) -> None:
    many_threads = {**SMALL, "resources": {**WHOLE_NODE, "threads_per_worker": 100}}
    async with reconciling(store, cluster, at_once):
        await running(jobs, cluster, "node0", **SMALL)
        await too_small(store, "node2", tasks=50)
        large = await queued(jobs, **ALL)
        small, _ = await jobs.submit({**JOB, **many_threads, "name": "small"})
        assert await until_decided(jobs, cluster, small.id) == large


async def test_a_failed_look_at_the_cluster_does_not_restart_the_age_in_the_queue(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings, passed: list[float]
) -> None:
    async with reconciling(store, cluster, settings):
        await running(jobs, cluster, "node0", **SMALL)
        large = await queued(jobs, **ALL)
        passed[0] = settings.reserve_after_s + 1.0
        cluster.unreachable = True
        await until_waits(jobs, large, "cluster")
        cluster.unreachable = False
        small, _ = await jobs.submit({**JOB, **SMALL, "name": "small"})
        assert await until_decided(jobs, cluster, small.id) == large


async def test_a_job_that_can_never_start_holds_no_elastic_job_back(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    async with reconciling(store, cluster, settings) as reconciler:
        elastic = await running(jobs, cluster, "node0", **ELASTIC)
        supervisor = cluster.supervisors[elastic]
        supervisor.form(1)
        supervisor.enter(Phase.RUNNING)
        await queued(jobs, **ALL)
        held = SizeOrder(None, is_held=True)
        await until(lambda: supervisor.sizes[-1:] == [held], what="the hold")
        await NodeService(store, reconciler.wake_for_nodes).cordon("node2", "new cables", None)
        await until(lambda: supervisor.sizes[-1] == SizeOrder(None), what="the end of the hold")


async def test_a_job_that_waits_for_a_gpu_leaves_the_other_nodes_to_elastic_jobs(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    with_gpu = replace(cluster.nodes.nodes[0], node_id="gpu", host="127.0.0.9", gpus=1.0)
    cluster.nodes = replace(cluster.nodes, nodes=(*cluster.nodes.nodes, with_gpu))
    on_gpu = {"parallel": {"dp_shard": 1}, "resources": {**WHOLE_NODE, "gpus_per_worker": 1}}
    async with reconciling(store, cluster, settings):
        elastic = await running(jobs, cluster, "node0", **ELASTIC)
        supervisor = cluster.supervisors[elastic]
        supervisor.form(1)
        supervisor.enter(Phase.RUNNING)
        await running(jobs, cluster, "gpu", **on_gpu, name="holder")
        await queued(jobs, **on_gpu, name="waits")
        beside = SizeOrder(None, is_held=True, held_off=("gpu",))
        await until(lambda: supervisor.sizes[-1:] == [beside], what="the order")


async def test_the_next_driver_of_a_job_keeps_it_off_the_nodes_that_were_reserved(
    store: Store, jobs: JobService, cluster: FakeCluster, at_once: Settings
) -> None:
    """The first one dies between the decision and the start."""
    tiny = replace(cluster.nodes.nodes[0], node_id="tiny", host="127.0.0.9", cpus=0.5)
    cluster.nodes = replace(cluster.nodes, nodes=(*cluster.nodes.nodes, tiny))
    dies, is_over = asyncio.Event(), asyncio.Event()

    async def crash_hook(point: CrashPoint) -> None:
        if point is CrashPoint.START_INTENDED and is_over.is_set():
            dies.set()
            await asyncio.Event().wait()

    hasty = paced(at_once, stop_deadline_s=0.05)
    async with reconciling(store, cluster, hasty, crash_hook):
        await running(jobs, cluster, "node0", **SMALL)
        await queued(jobs, **ALL)
        is_over.set()
        half, _ = await jobs.submit({**JOB, **HALF, "name": "half"})
        await until(dies.is_set, what="the decision")
    assert half.id not in cluster.supervisors
    async with reconciling(store, cluster, at_once):
        await until(lambda: half.id in cluster.supervisors, what="the start")
    assert cluster.supervisors[half.id].launch.reserved == ("node0", "node1", "node2")
