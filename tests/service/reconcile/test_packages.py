"""A job with packages of its own takes nodes only after one has installed them."""

from __future__ import annotations

from tests.support.service.fake_cluster import FakeCluster
from tests.support.service.job_drives import (
    JOB,
    kinds,
    reconciling,
    until,
    until_state,
    until_waits,
)

from holdfast_service.job_model.lifecycle import State
from holdfast_service.job_model.supervisor_protocol import PackagesAnswer
from holdfast_service.services.jobs import JobService
from holdfast_service.settings import Settings
from holdfast_service.store.engine import Store

WANTED = ["einops>=0.8"]
PINNED = ("einops==0.8.1",)
WITH_PACKAGES = {**JOB, "runtime_env": {"pip": WANTED}}


async def started(store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings) -> str:
    """The id of a job whose packages a node has installed, once it has its supervisor."""
    cluster.packages = PackagesAnswer("10.0.0.1", PINNED)
    async with reconciling(store, cluster, settings):
        job, _ = await jobs.submit(WITH_PACKAGES)
        await until(lambda: job.id in cluster.supervisors)
    return job.id


async def test_the_versions_that_a_node_found_go_to_all_nodes_of_the_job(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    job_id = await started(store, jobs, cluster, settings)
    assert cluster.supervisors[job_id].launch.packages == PINNED
    assert (await jobs.get(job_id)).packages == PINNED
    assert "packages.installed" in await kinds(jobs, job_id)


async def test_packages_that_cannot_be_installed_end_the_job_before_it_takes_nodes(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    cluster.packages = PackagesAnswer("10.0.0.1", error="pip failed: no such package")
    async with reconciling(store, cluster, settings):
        job, _ = await jobs.submit(WITH_PACKAGES)
        ended = await until_state(jobs, job.id, State.FAILED)
    assert ended.outcome is not None
    assert ended.outcome.code == "packages_failed"
    assert ended.outcome.message == "on 10.0.0.1: pip failed: no such package"
    assert job.id not in cluster.starts


async def test_a_job_waits_for_an_installation_without_keeping_others_from_nodes(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    async with reconciling(store, cluster, settings):
        waits, _ = await jobs.submit(WITH_PACKAGES)
        await until_waits(jobs, waits.id, "packages")
        other, _ = await jobs.submit(JOB)
        await until(lambda: other.id in cluster.supervisors)
        assert (await jobs.get(waits.id)).state == State.QUEUED
        await jobs.cancel(waits.id)
        await until_state(jobs, waits.id, State.CANCELLED)
        assert waits.id not in cluster.starts


async def test_another_server_goes_on_with_the_versions_that_are_known(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    """A job that is paused and resumed has the same packages, also if newer ones exist."""
    job_id = await started(store, jobs, cluster, settings)
    cluster.packages = PackagesAnswer("10.0.0.1", ("einops==0.9",))
    cluster.supervisors.clear()  # lost with its node
    async with reconciling(store, cluster, settings):
        await until(lambda: job_id in cluster.supervisors)
    assert cluster.supervisors[job_id].launch.packages == PINNED
    assert cluster.installations == 1
