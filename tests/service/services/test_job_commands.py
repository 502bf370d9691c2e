"""Commands of users to jobs (cancel, pause, resume, resize), carried out on a scripted cluster."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from tests.support.service.fake_cluster import FakeCluster, three_nodes
from tests.support.service.job_drives import (
    JOB,
    all_digests,
    kinds,
    reconciling,
    submitted,
    until,
    until_released,
    until_state,
)

from holdfast_service.errors import InvalidParameters, JobChanged, JobEnded
from holdfast_service.job_model.lifecycle import State
from holdfast_service.job_model.supervisor_protocol import (
    EventKind,
    NodeCapacity,
    Phase,
    SizeOrder,
    StopKind,
)
from holdfast_service.services.jobs import JobService
from holdfast_service.settings import Settings
from holdfast_service.store.engine import Store
from holdfast_service.store.transaction import job_transaction


async def test_cancel_of_a_queued_job_needs_no_cluster(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    cluster.unreachable = True
    job, created = await jobs.submit(JOB)
    assert created
    assert (await jobs.cancel(job.id)).state is State.CANCELLED
    async with reconciling(store, cluster, settings):
        await until_released(jobs, job.id)
    assert not cluster.releases


async def test_cancel_of_a_running_job_ends_it_on_the_cluster(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    async with reconciling(store, cluster, settings):
        supervisor = await submitted(jobs, cluster)
        supervisor.form(1)
        supervisor.enter(Phase.RUNNING)
        await until_state(jobs, supervisor.launch.job_id, State.RUNNING)
        for _ in range(2):
            await jobs.cancel(supervisor.launch.job_id)
        job = await until_released(jobs, supervisor.launch.job_id)
    assert job.state is State.CANCELLED
    assert {order.kind for order in supervisor.orders} == {StopKind.CANCEL}
    assert (await kinds(jobs, job.id)).count("job.cancel_requested") == 1


async def test_an_ignored_cancel_removes_the_resources_by_force(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    hasty = settings.model_copy(update={"cancel_deadline_s": 0.2})
    job = {**JOB, "checkpoint": {"final_save_s": 0}}
    async with reconciling(store, cluster, hasty):
        supervisor = await submitted(jobs, cluster, **job)
        supervisor.obeys = False
        await jobs.cancel(supervisor.launch.job_id)
        await until_state(jobs, supervisor.launch.job_id, State.CANCELLED)
    assert not cluster.supervisors


async def test_a_program_is_stopped_no_sooner_than_its_ranks_may_take_to_end(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    spec = {"name": "x", "command": "train", "program": {"grace_s": 120}}
    async with reconciling(store, cluster, settings):
        job, _ = await jobs.submit(spec)
        await until(lambda: job.id in cluster.supervisors, what="a supervisor")
        supervisor = cluster.supervisors[job.id]
        supervisor.form(1)
        supervisor.enter(Phase.RUNNING)
        await until_state(jobs, job.id, State.RUNNING)
        before = time.time()
        await jobs.pause(job.id)
        await until_state(jobs, job.id, State.PAUSED)
    assert supervisor.orders[-1].deadline - before >= 2 * 120


async def test_a_paused_job_holds_no_resources_and_resumes_with_its_history(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    async with reconciling(store, cluster, settings) as reconciler:
        supervisor = await submitted(jobs, cluster)
        job_id = supervisor.launch.job_id
        supervisor.form(1)
        supervisor.enter(Phase.RUNNING)
        supervisor.run(1, 1, 10)
        await until_state(jobs, job_id, State.RUNNING)
        for _ in range(2):
            await jobs.pause(job_id)
        paused = await until_state(jobs, job_id, State.PAUSED)
        assert (paused.progress.step, paused.outcome) == (10, None)
        assert not cluster.supervisors
        assert (await kinds(jobs, job_id)).count("job.pause_requested") == 1

        await jobs.resume(job_id)
        reconciler.wake(job_id)
        await until(lambda: job_id in cluster.supervisors, what="another supervisor")
        again = cluster.supervisors[job_id]
        assert (again.launch.last_attempt, again.launch.last_event) == (1, len(supervisor.events))
        again.form(2, restore_step=10)
        again.run(2, 11, 20)
        again.end()
        job = await until_released(jobs, job_id)
    assert (job.state, job.progress.step) == (State.SUCCEEDED, 20)
    assert len(await all_digests(jobs, job_id)) == 20


async def test_a_job_continues_after_its_pause_was_undone(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    async with reconciling(store, cluster, settings):
        supervisor = await submitted(jobs, cluster)
        supervisor.obeys = False
        supervisor.enter(Phase.RUNNING)
        job_id = supervisor.launch.job_id
        await until_state(jobs, job_id, State.RUNNING)
        await jobs.pause(job_id)
        await until_state(jobs, job_id, State.PAUSING)
        supervisor.emit(EventKind.STOP_UNDONE, wanted="pause", reason="nothing is durable", step=3)
        job = await until_state(jobs, job_id, State.RUNNING)
        assert job.desired == "running"
        supervisor.obeys = True
        await jobs.pause(job_id)
        await until_state(jobs, job_id, State.PAUSED)


async def test_a_job_may_be_resumed_or_cancelled_while_it_pauses(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    cluster.nodes = three_nodes(roomy=True)
    async with reconciling(store, cluster, settings):
        for last in (State.STARTING, State.CANCELLED):
            supervisor = await submitted(jobs, cluster)
            supervisor.obeys = False
            job_id = supervisor.launch.job_id
            await jobs.pause(job_id)
            await until_state(jobs, job_id, State.PAUSING)
            await (jobs.resume if last is State.STARTING else jobs.cancel)(job_id)
            supervisor.end("PAUSED", "paused", message="")
            await until_state(jobs, job_id, last)


async def test_an_immediate_cancel_is_sent_to_the_supervisor(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    async with reconciling(store, cluster, settings):
        supervisor = await submitted(jobs, cluster)
        supervisor.obeys = False
        supervisor.enter(Phase.RUNNING)
        job_id = supervisor.launch.job_id
        await jobs.cancel(job_id)
        await until(lambda: bool(supervisor.orders))
        assert supervisor.orders[0].deadline > time.time()
        await jobs.cancel(job_id, now=True)
        await until(lambda: supervisor.orders[-1].deadline == 0.0)


ELASTIC: dict[str, Any] = {
    "parallel": {"dp_shard": "auto"},
    "resources": {"nodes": {"min": 1, "max": 3}, "workers_per_node": 1, "standby_nodes": 0},
}


async def test_an_ordered_size_reaches_each_supervisor_of_the_job(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    async with reconciling(store, cluster, settings) as reconciler:
        supervisor = await submitted(jobs, cluster, **ELASTIC)
        job_id = supervisor.launch.job_id
        supervisor.form(1)
        supervisor.enter(Phase.RUNNING)
        for _ in range(2):
            await jobs.resize(job_id, 2)
        reconciler.wake(job_id)
        await until(lambda: SizeOrder(2) in supervisor.sizes, what="the order")
        assert supervisor.sizes.count(SizeOrder(2)) == 1
        supervisor.size = SizeOrder(None)  # a restarted one
        await until(lambda: supervisor.sizes.count(SizeOrder(2)) == 2, what="the order again")
        await jobs.resize(job_id, None)
        reconciler.wake(job_id)
        await until(lambda: supervisor.sizes[-1] == SizeOrder(None), what="the last order")
        assert (await kinds(jobs, job_id)).count("job.resize_requested") == 2
        await jobs.cancel(job_id)
        await until_state(jobs, job_id, State.CANCELLED)
    with pytest.raises(JobEnded):
        await jobs.resize(job_id, 2)


async def test_a_size_outside_of_the_jobs_range_is_refused(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    cluster.unreachable = True
    elastic, _ = await jobs.submit({**JOB, **ELASTIC})
    with pytest.raises(InvalidParameters, match="trains on 1 to 3 nodes, not on 4"):
        await jobs.resize(elastic.id, 4)
    fixed, _ = await jobs.submit(JOB)
    with pytest.raises(InvalidParameters, match=r"only a spec with resources.nodes"):
        await jobs.resize(fixed.id, 1)


async def test_an_elastic_job_is_held_while_another_waits_for_nodes(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    """A third one that fits beside the nodes reserved for the waiting job is placed off them."""
    tiny = NodeCapacity("tiny", "127.0.0.9", cpus=0.5, gpus=0.0)
    cluster.nodes = replace(cluster.nodes, nodes=(*cluster.nodes.nodes, tiny))
    quick = settings.model_copy(update={"reserve_after_s": 0.0})
    async with reconciling(store, cluster, quick):
        whole = {**ELASTIC["resources"], "cpus_per_worker": 1}
        supervisor = await submitted(jobs, cluster, **{**ELASTIC, "resources": whole})
        placed = {supervisor.launch.job_id: ["node0"]}
        cluster.nodes = replace(cluster.nodes, placed=placed)
        supervisor.form(1)
        supervisor.enter(Phase.RUNNING)
        waiting, _ = await jobs.submit({**JOB, "name": "waiting"})
        held = SizeOrder(None, is_held=True)
        await until(lambda: supervisor.sizes[-1:] == [held], what="the hold")
        small = {**ELASTIC["resources"], "cpus_per_worker": 0.5}
        second = await submitted(jobs, cluster, **{**ELASTIC, "name": "second", "resources": small})
        assert second.launch.reserved == ("node0", "node1", "node2")
        await jobs.cancel(waiting.id)
        await until_state(jobs, waiting.id, State.CANCELLED)
        # The second has started, and its nodes are not free for the first while it has none.
        placed |= {second.launch.job_id: ["tiny"]}
        cluster.nodes = replace(cluster.nodes, placed=placed)
        await until(lambda: supervisor.sizes[-1] == SizeOrder(None), what="its place")
        assert all(size.is_held for size in supervisor.sizes[1:-1])


async def test_a_hasty_cancel_of_a_job_that_was_changed_is_refused(
    store: Store, jobs: JobService
) -> None:
    job, _ = await jobs.submit({"name": "x"})
    async with job_transaction(store, job.id) as tx:
        tx.transition(State.STARTING)
    cancelled = await jobs.cancel(job.id)
    with pytest.raises(JobChanged):  # it would give up the last checkpoint
        await jobs.cancel(job.id, now=True, expected=frozenset({job.generation}))
    hasty = await jobs.cancel(job.id, now=True, expected=frozenset({cancelled.generation}))
    assert (cancelled.generation, hasty.generation) == (2, 3)
    again = await jobs.cancel(job.id, now=True, expected=frozenset({job.generation}))
    assert again.generation == 3, "nothing was left to change"
