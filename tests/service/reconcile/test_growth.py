"""An autoscaled cluster is asked for the nodes that queued jobs lack, by any server."""

from __future__ import annotations

from dataclasses import replace

from tests.support.service.fake_cluster import FakeCluster, three_nodes
from tests.support.service.job_drives import JOB, reconciling, submitted, until, until_state

from holdfast_service.job_model.lifecycle import State
from holdfast_service.job_model.supervisor_protocol import Phase, SizeOrder
from holdfast_service.services.jobs import JobService
from holdfast_service.settings import Settings
from holdfast_service.store.engine import Store

ELASTIC = {
    "name": "elastic",
    "parallel": {"dp_shard": 2},
    "resources": {"workers_per_node": 1, "nodes": {"min": 1, "max": 2}},
}


def grown(nodes: int) -> FakeCluster:
    """A cluster with so many of the nodes that `JOB` needs, which can grow."""
    return FakeCluster(replace(three_nodes(), nodes=three_nodes().nodes[:nodes], can_grow=True))


async def test_a_job_is_asked_for_until_its_nodes_have_come(
    store: Store, jobs: JobService, settings: Settings
) -> None:
    cluster = grown(1)
    async with reconciling(store, cluster, settings):
        job, _ = await jobs.submit(JOB)
        await until(lambda: bool(cluster.asked_for), what="a request")
        (request,) = cluster.asked_for
        assert (request.job, request.nodes, request.new, request.off) == (job.id, 3, 2, ())

        async def says_so() -> bool:
            waiting = (await jobs.get(job.id)).waiting
            return waiting is not None and waiting.asked is not None

        await until(says_so, what="the reason")
        waiting = (await jobs.get(job.id)).waiting
        assert waiting is not None and waiting.asked is not None
        assert (waiting.asked.nodes, waiting.asked.gpus) == (2, 0.0)
        assert waiting.reason.endswith(f"; the cluster grows: it was asked for {request.what}")
        assert job.id not in cluster.supervisors, "it keeps its place in the queue meanwhile"
        cluster.nodes = replace(three_nodes(), can_grow=True)
        await until(lambda: job.id in cluster.supervisors, what="the start")
        await until(lambda: not cluster.asked_for, what="the withdrawal")


async def test_the_request_of_a_cancelled_job_is_withdrawn_also_by_another_server(
    store: Store, jobs: JobService, settings: Settings
) -> None:
    cluster = grown(0)
    async with reconciling(store, cluster, settings):
        first, _ = await jobs.submit({**JOB, "name": "first"})
        second, _ = await jobs.submit({**JOB, "name": "second"})
        await until(lambda: len(cluster.asked_for) == 2, what="both requests")
        await jobs.cancel(first.id)
        await until(lambda: [r.job for r in cluster.asked_for] == [second.id])
    await jobs.cancel(second.id)
    async with reconciling(store, cluster, settings):
        await until(lambda: not cluster.asked_for, what="the next server's withdrawal")


async def test_a_bound_is_the_reason_why_a_job_waits(
    store: Store, jobs: JobService, settings: Settings
) -> None:
    cluster = grown(1)
    bounded = settings.model_copy(update={"autoscale_nodes": 2})
    async with reconciling(store, cluster, bounded):
        job, _ = await jobs.submit(JOB)

        async def says_so() -> bool:
            waiting = (await jobs.get(job.id)).waiting
            return waiting is not None and "HOLDFAST_AUTOSCALE_NODES allows 2" in waiting.reason

        await until(says_so, what="the reason")
        assert not cluster.asked_for
    assert store.growth.bounds is not None and store.growth.bounds.nodes == 2


async def test_an_elastic_job_takes_no_more_than_the_bounds_allow(
    store: Store, jobs: JobService, settings: Settings
) -> None:
    cluster = grown(1)
    bounded = settings.model_copy(update={"autoscale_nodes": 1})
    async with reconciling(store, cluster, bounded):
        supervisor = await submitted(jobs, cluster, **ELASTIC)
        job = supervisor.launch.job_id
        cluster.nodes = replace(cluster.nodes, placed={job: ("node0",)})
        supervisor.form(1)
        supervisor.enter(Phase.RUNNING)
        await until_state(jobs, job, State.RUNNING)
        await until(lambda: SizeOrder(None, is_held=True) in supervisor.sizes)
        more = (*cluster.nodes.nodes, replace(cluster.nodes.nodes[0], node_id="free"))
        cluster.nodes = replace(cluster.nodes, nodes=more)
        await until(lambda: supervisor.sizes[-1] == SizeOrder(None), what="a free node")
