"""Replays of jobs and their comparison, on both databases."""

from __future__ import annotations

import pytest
from tests.support.service.fake_cluster import FakeCluster, FakeSupervisor
from tests.support.service.job_drives import reconciling, until, until_state

from holdfast_service.errors import (
    InvalidKey,
    InvalidSpec,
    JobNotFound,
    NotAReplay,
    NothingToReplay,
)
from holdfast_service.job_model.lifecycle import State
from holdfast_service.job_model.supervisor_protocol import Phase
from holdfast_service.services.jobs import JobService
from holdfast_service.services.replays import ReplayService
from holdfast_service.settings import Settings
from holdfast_service.store.engine import Store
from holdfast_service.store.models import JobRecord
from holdfast_service.views.comparison import ReplayResult

ELASTIC = {
    "name": "elastic",
    "parallel": {"dp_shard": "auto", "tp": 2},
    "resources": {"nodes": {"min": 1, "max": 3}, "workers_per_node": 2, "standby_nodes": 0},
    "train": {"steps": 500, "global_batch": 12, "micro_batch": 2},
}
FIXED = {**ELASTIC, "parallel": {"dp_shard": 2, "tp": 2}, "resources": {"workers_per_node": 2}}
HISTORY = ((0, 3, 150), (149, 2, 300), (300, 3, 330))
"""(restored step, size of dp_shard, last step) of each attempt."""


@pytest.fixture
def replays(store: Store, jobs: JobService) -> ReplayService:
    return ReplayService(store, jobs)


def play(supervisor: FakeSupervisor, *attempts: tuple[int, int, int]) -> None:
    supervisor.enter(Phase.RUNNING)
    for number, (restored, size, last) in enumerate(attempts, supervisor.attempt + 1):
        supervisor.form(number, restored, {"dp_shard": size, "tp": 2})
        supervisor.run(number, restored + 1, last)


async def seen(jobs: JobService, job_id: str, step: int) -> None:
    """Wait until the digest of the step is stored."""

    async def there() -> bool:
        page = await jobs.history.digests(job_id, after_step=step - 1)
        return (
            step in {item.step for item in page.items}
            and ((await jobs.get(job_id)).progress.step or 0) >= step
        )

    await until(there, what=f"step {step}")


async def started(jobs: JobService, cluster: FakeCluster, job_id: str) -> FakeSupervisor:
    await until(lambda: job_id in cluster.supervisors, what="a supervisor")
    return cluster.supervisors[job_id]


async def ended(
    jobs: JobService, cluster: FakeCluster, spec: object, *attempts: tuple[int, int, int]
) -> str:
    """A job that made these attempts and was cancelled."""
    assert isinstance(spec, dict)
    job, _ = await jobs.submit(spec)
    supervisor = await started(jobs, cluster, job.id)
    play(supervisor, *attempts)
    await seen(jobs, job.id, attempts[-1][2])
    supervisor.end("CANCELLED", "cancelled")
    await until_state(jobs, job.id, State.CANCELLED)
    return job.id


async def test_a_replay_of_an_elastic_job_is_scheduled_and_compared_while_it_runs(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings, replays: ReplayService
) -> None:
    async with reconciling(store, cluster, settings):
        original = await ended(jobs, cluster, ELASTIC, *HISTORY)
        replay, created = await replays.replay(original)
        assert created
        assert (replay.name, replay.spec["labels"]["replay-of"]) == ("elastic-replay", original)
        assert replay.spec["resources"]["nodes"]["schedule"] == [
            {"after_step": step, "mesh": {"dp_shard": size, "tp": 2}} for step, size, _ in HISTORY
        ]
        found = await replays.compare(replay.id)
        assert (found.result, found.until_step) == (ReplayResult.RUNNING, 330)
        supervisor = await started(jobs, cluster, replay.id)
        play(supervisor, (0, 3, 149), (149, 2, 200))
        await seen(jobs, replay.id, 200)
        found = await replays.compare(replay.id)
        assert (found.result, found.equal, found.to_come) == (ReplayResult.RUNNING, 200, 130)
        play(supervisor, (200, 2, 300), (300, 3, 340))
        await seen(jobs, replay.id, 340)
    found = await replays.compare(replay.id)
    assert (found.result, found.equal, found.compared) == (ReplayResult.EQUAL, 330, 330)
    page = await replays.compare(replay.id, after_step=200, limit=100)
    assert (page.compared, page.last_step, page.next_cursor) == (100, 300, "300")


async def test_a_replay_of_a_running_job_covers_its_steps_so_far(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings, replays: ReplayService
) -> None:
    async with reconciling(store, cluster, settings):
        job, _ = await jobs.submit(ELASTIC)
        supervisor = await started(jobs, cluster, job.id)
        play(supervisor, (0, 3, 10), (10, 2, 30))
        await seen(jobs, job.id, 30)
        replay, _ = await replays.replay(job.id, "key")
        play(supervisor, (30, 1, 40))
        await seen(jobs, job.id, 40)
        again, created = await replays.replay(job.id, "key")
        assert (again.id, created) == (replay.id, False)
        later, _ = await replays.replay(job.id)
        other, _ = await jobs.submit({**FIXED, "name": "other"})
        with pytest.raises(NothingToReplay):  # the keys of each job are apart
            await replays.replay(other.id, "key")
        long, created = await replays.replay(job.id, "k" * 255)
        assert created and (await replays.replay(job.id, "k" * 255))[0].id == long.id
        with pytest.raises(InvalidKey):
            await replays.replay(job.id, "k" * 256)
    assert (await replays.compare(replay.id)).until_step == 30
    schedules = [job.spec["resources"]["nodes"]["schedule"] for job in (replay, later)]
    assert [[entry["after_step"] for entry in entries] for entries in schedules] == [
        [0, 10],
        [0, 10, 30],
    ]


async def test_a_job_whose_bits_do_not_repeat_has_no_proof(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings, replays: ReplayService
) -> None:
    async with reconciling(store, cluster, settings):
        job, _ = await jobs.submit({**ELASTIC, "train": {"deterministic": "fast"}})
        play(await started(jobs, cluster, job.id), (0, 3, 10))
        await seen(jobs, job.id, 10)
        with pytest.raises(NothingToReplay, match=r"fast.*last bits.*strict"):
            await replays.replay(job.id)


async def test_a_digest_beyond_the_committed_step_is_not_replayed(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings, replays: ReplayService
) -> None:
    """A job that restored an older step, and was cancelled before it computed the steps again."""
    async with reconciling(store, cluster, settings):
        job, _ = await jobs.submit(ELASTIC)
        supervisor = await started(jobs, cluster, job.id)
        play(supervisor, (0, 3, 30))
        await seen(jobs, job.id, 30)
        supervisor.form(2, 20, {"dp_shard": 2, "tp": 2})
        supervisor.step = 20
        supervisor.end("CANCELLED", "cancelled")
        await until_state(jobs, job.id, State.CANCELLED)
        replay, _ = await replays.replay(job.id)
    assert replay.spec["labels"]["replay-until"] == "20"
    assert len(replay.spec["resources"]["nodes"]["schedule"]) == 1


async def test_a_job_that_proves_nothing_is_not_replayed(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings, replays: ReplayService
) -> None:
    job, _ = await jobs.submit(ELASTIC)
    with pytest.raises(NothingToReplay, match="has committed no step"):
        await replays.replay(job.id)
    program, _ = await jobs.submit({"name": "program", "command": "trainer"})
    with pytest.raises(NothingToReplay, match="only recipes and functions"):
        await replays.replay(program.id)
    without, _ = await jobs.submit({**ELASTIC, "checkpoint": {"digest_every_steps": 0}})
    with pytest.raises(NothingToReplay, match="digest_every_steps"):
        await replays.replay(without.id)
    with pytest.raises(NotAReplay, match="/replay starts one"):
        await replays.compare(job.id)
    with pytest.raises(JobNotFound):
        await replays.replay("0199aaaa-0000-7000-8000-000000000000")


async def test_a_job_whose_initial_checkpoint_is_gone_is_not_replayed(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings, replays: ReplayService
) -> None:
    async with reconciling(store, cluster, settings):
        job_id = await ended(jobs, cluster, FIXED, (0, 2, 5))
    async with store.write() as session:
        job = await session.get_one(JobRecord, job_id)
        gone = f"{settings.data_dir}/gone/step-00000003"
        job.origin = {"uri": gone, "step": 3, "what": "everything", "job": None, "held": False}
    with pytest.raises(InvalidSpec) as refused:
        await replays.replay(job_id)
    assert [fault["path"] for fault in refused.value.faults] == ["init_from"]
    assert gone in refused.value.faults[0]["message"]
