"""What the reaper releases: by the pure plan, and of a store with ended and removed jobs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import update
from tests.support.service.fake_cluster import FakeCluster, FakeSupervisor

from holdfast_service.job_model.job_spec import JobSpec
from holdfast_service.job_model.supervisor_protocol import JobPlan
from holdfast_service.reconcile.reaper import Reaper, plan_sweep
from holdfast_service.services.checkpoints import CheckpointService
from holdfast_service.services.job_removal import JobRemoval
from holdfast_service.services.jobs import JobService
from holdfast_service.settings import Settings
from holdfast_service.store.engine import Store
from holdfast_service.store.models import JobRecord

names = st.sampled_from("abcdef")


@given(st.sets(names), st.dictionaries(names, st.booleans()), st.sets(names), st.booleans())
def test_only_jobs_that_are_over_are_released_and_twice_unknown_ones_if_the_operator_says_so(
    present: set[str], over: dict[str, bool], suspects: set[str], release_unknown: bool
) -> None:
    plan = plan_sweep(present, over, suspects, release_unknown)
    assert plan.unknown == present - over.keys()
    for job in present:
        confirmed = release_unknown and job in suspects
        assert (job in plan.to_release) is over.get(job, confirmed)
    assert plan.to_release <= present
    # Then a job that is still unknown at the next sweep is released.
    again = plan_sweep(present, over, plan.unknown, release_unknown)
    assert plan.unknown <= again.to_release or not release_unknown


class SlowlyReleased(FakeCluster):
    """Like Ray's cluster: the first pass ends the processes, by which the job is found; a later one
    finds none, and frees what dead agents left in shared memory."""

    def __init__(self) -> None:
        super().__init__()
        self.segments: set[str] = set()

    async def release(self, job_id: str) -> bool:
        if self.supervisors.pop(job_id, None) is not None:
            return False
        self.segments.discard(job_id)
        return True


@pytest.fixture
async def removed(store: Store, settings: Settings, jobs: JobService) -> str:
    """A job that was removed with its history."""
    job, _ = await jobs.submit({"name": "gone"})
    await jobs.cancel(job.id)
    async with store.write() as session:
        await session.execute(update(JobRecord).values(cleaned=True))
    removal = JobRemoval(store, CheckpointService(store, settings), settings)
    await removal.remove(job.id, with_checkpoints=False)
    return job.id


def leave(cluster: SlowlyReleased, job_id: str) -> None:
    """As a server that lost its lease may start a job again, after it has ended."""
    launch = JobPlan(job_id, JobSpec(name="gone"))
    cluster.supervisors[job_id] = FakeSupervisor(launch)
    cluster.segments.add(job_id)


async def test_leftovers_of_a_removed_job_are_released_without_the_operators_word(
    store: Store, removed: str
) -> None:
    cluster = SlowlyReleased()
    reaper = Reaper(store, cluster, release_unknown=False)
    leave(cluster, removed)
    leave(cluster, "stranger")
    released = [job for _ in range(4) for job in await reaper.sweep(())]
    assert set(cluster.supervisors) == {"stranger"}
    assert released == [removed]


async def test_a_release_that_needs_several_passes_is_completed(store: Store, removed: str) -> None:
    cluster = SlowlyReleased()
    reaper = Reaper(store, cluster, release_unknown=True)
    for job in (removed, "stranger"):
        leave(cluster, job)
    released = [job for _ in range(4) for job in await reaper.sweep(())]
    assert sorted(released) == sorted([removed, "stranger"])
    assert cluster.segments == set(), "the processes had ended; their segments were left"
