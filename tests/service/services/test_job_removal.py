"""What others see of a removal: the live streams, the totals over all jobs, a repeated request."""

from __future__ import annotations

import time
from typing import Any

import pytest
from sqlalchemy import select, update
from structlog.testing import capture_logs
from tests.service.live.test_live_hub import hub_of, listening

from holdfast_service.errors import JobNotEnded, JobNotFound, StorageUnavailable
from holdfast_service.readers.fleet_metrics import FleetReader
from holdfast_service.services import job_removal
from holdfast_service.services.checkpoints import CheckpointService
from holdfast_service.services.job_removal import JobRemoval
from holdfast_service.services.jobs import JobService
from holdfast_service.settings import Settings
from holdfast_service.store.engine import Store
from holdfast_service.store.models import IncidentRow, Intent, JobRecord, RemovedJob


@pytest.fixture
def removal(store: Store, settings: Settings) -> JobRemoval:
    return JobRemoval(store, CheckpointService(store, settings), settings)


async def ended(store: Store, jobs: JobService, name: str) -> str:
    """The id of a job that has ended and left the cluster."""
    job, _ = await jobs.submit({"name": name})
    await jobs.cancel(job.id)
    async with store.write() as session:
        changes = {"cleaned": True, "held_s": 10.0, "productive_s": 8.0}
        await session.execute(update(JobRecord).where(JobRecord.id == job.id).values(changes))
    return job.id


async def test_listeners_learn_of_a_removal_and_miss_no_later_change(
    store: Store, jobs: JobService, removal: JobRemoval
) -> None:
    other, _ = await jobs.submit({"name": "other"})
    gone = await ended(store, jobs, "gone")  # its change number is the greatest
    hub = hub_of(store)
    async with listening(hub) as listener:
        before = listener.cursor
        await removal.remove(gone, with_checkpoints=False)
        await listener.until(lambda it: bool(it.received("removed")))
        await jobs.cancel(other.id)
        await listener.until(lambda it: bool(it.received("row")))
        assert listener.received("removed") == [{"id": gone}]
        assert [row["id"] for row in listener.received("row")] == [other.id]
    async with listening(hub_of(store), cursor=before) as elsewhere:
        await elsewhere.until(lambda it: bool(it.received("row") and it.received("removed")))


async def test_a_page_of_a_removed_job_is_not_read_again(
    store: Store, jobs: JobService, removal: JobRemoval
) -> None:
    gone = await ended(store, jobs, "gone")
    other, _ = await jobs.submit({"name": "other"})
    with capture_logs() as logs:
        async with listening(hub_of(store), gone) as listener:
            await removal.remove(gone, with_checkpoints=False)
            await listener.until(lambda it: bool(it.received("removed")))
            await jobs.cancel(other.id)
            await listener.until(lambda it: bool(it.received("row")))
    assert [line for line in logs if line["event"] == "live.job_unreadable"] == []


async def test_change_numbers_are_never_used_again(
    store: Store, jobs: JobService, removal: JobRemoval
) -> None:
    numbers: list[int] = []
    for turn in range(3):
        gone = await ended(store, jobs, f"gone{turn}")
        async with store.read() as session:
            numbers += await session.scalars(select(JobRecord.changed))
        await removal.remove(gone, with_checkpoints=False)
        async with store.read() as session:
            newest = select(RemovedJob.changed).where(RemovedJob.id == gone)
            numbers += await session.scalars(newest)
    assert numbers == sorted(set(numbers))


async def test_totals_over_all_jobs_do_not_fall(
    store: Store, jobs: JobService, removal: JobRemoval
) -> None:
    ids = [await ended(store, jobs, name) for name in ("a", "b", "c")]

    def incident(job_id: str, number: int, closed_at: float | None) -> IncidentRow:
        data = {"cause": "hang", "decision": "ignore", "evidence": ["long"], "steps_lost": 2}
        data["phases_s"] = {"total": 0.3}
        return IncidentRow(
            job_id=job_id, number=number, opened_at=1.0, closed_at=closed_at, data=data
        )

    async with store.write() as session:
        session.add_all(incident(job_id, 1, time.time()) for job_id in ids)
        session.add(incident(ids[0], 2, None))  # it never closed: it does not count
    reader = FleetReader(store)
    for job_id in (None, *ids):
        if job_id is not None:
            if job_id == ids[2]:  # closed since the last reading, and removed at once
                async with store.write() as session:
                    session.add(incident(job_id, 2, time.time()))
            await removal.remove(job_id, with_checkpoints=False)
        for each in (reader, FleetReader(store)):  # of a server that has just started, too
            totals = await each.statistics(time.time())
            closed = 4 if job_id == ids[2] else 3
            assert (totals.held_s, totals.effective_s) == (30.0, 24.0)
            assert (totals.incidents, totals.lost_steps) == (
                {("hang", "ignore"): closed},
                2 * closed,
            )
            assert sum(totals.phases["total"].counts) == closed


async def test_a_repeated_removal_has_the_first_answer(
    store: Store, jobs: JobService, removal: JobRemoval
) -> None:
    gone = await ended(store, jobs, "gone")
    first = await removal.remove(gone, with_checkpoints=False)
    assert await removal.remove(gone, with_checkpoints=True) == first
    with pytest.raises(JobNotFound):
        await removal.remove("01a1facd-0000-7000-8000-000000000000", with_checkpoints=False)
    running, _ = await jobs.submit({"name": "running"})
    with pytest.raises(JobNotEnded):
        await removal.remove(running.id, with_checkpoints=False)


async def test_jobs_that_cannot_be_removed_do_not_keep_others(
    store: Store, settings: Settings, jobs: JobService, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, _ = [await ended(store, jobs, name) for name in ("bad", "good")]
    settings = settings.model_copy(update={"keep_ended_jobs_s": 60.0})
    by_age = JobRemoval(store, CheckpointService(store, settings), settings)
    remove = JobRemoval.remove

    async def fails_once(self: JobRemoval, job_id: str, *, with_checkpoints: bool) -> Any:
        assert not with_checkpoints
        if job_id == bad:
            raise OSError("its folder cannot be read")
        return await remove(self, job_id, with_checkpoints=with_checkpoints)

    monkeypatch.setattr(JobRemoval, "remove", fails_once)
    monkeypatch.setattr(job_removal, "EXPIRE_AT_ONCE", 1)
    removed = [await by_age.expire(time.time() + 120) for _ in range(60)]
    assert sum(removed) == 1, "one of two is chosen each time: 60 times the same is no chance"
    async with store.read() as session:
        assert list(await session.scalars(select(JobRecord.id))) == [bad]


async def unreachable(self: CheckpointService, job_id: str) -> tuple[str, ...]:
    raise StorageUnavailable(f"the bucket of {job_id} is gone")


async def test_begun_removals_that_cannot_be_completed_do_not_keep_others(
    store: Store, jobs: JobService, removal: JobRemoval, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = [await ended(store, jobs, name) for name in ("bad", "good")]
    remove_all = CheckpointService.remove_all

    async def one_is_gone(self: CheckpointService, job_id: str) -> tuple[str, ...]:
        return await (unreachable if job_id == bad else remove_all)(self, job_id)

    with monkeypatch.context() as away:
        away.setattr(CheckpointService, "remove_all", unreachable)
        for job_id in (bad, good):
            with pytest.raises(StorageUnavailable):
                await removal.remove(job_id, with_checkpoints=True)
    monkeypatch.setattr(CheckpointService, "remove_all", one_is_gone)
    monkeypatch.setattr(job_removal, "EXPIRE_AT_ONCE", 1)
    later = time.time() + 3600
    for _ in range(60):  # one of two is chosen each time: 60 times the same is no chance
        if removed := await removal.complete_begun(later):
            break
    assert removed == [good]


async def test_no_server_completes_a_removal_that_is_being_repeated(
    store: Store, jobs: JobService, removal: JobRemoval, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = await ended(store, jobs, "gone")
    tried: list[str] = []

    async def unreachable_again(self: CheckpointService, job_id: str) -> tuple[str, ...]:
        tried.append(job_id)
        return await unreachable(self, job_id)

    monkeypatch.setattr(CheckpointService, "remove_all", unreachable_again)
    for repeated in (False, True):
        with pytest.raises(StorageUnavailable):
            await removal.remove(gone, with_checkpoints=not repeated)
        if not repeated:
            async with store.write() as session:
                await session.execute(update(Intent).values(at=1.0))  # it began long ago
    await removal.complete_begun(time.time())
    assert tried == [gone] * 2, "the request may still be at work"


async def test_an_unreadable_job_does_not_keep_others_from_being_removed_by_age(
    store: Store, settings: Settings, jobs: JobService
) -> None:
    bad, good = [await ended(store, jobs, name) for name in ("bad", "good")]
    async with store.write() as session:
        spoilt = update(JobRecord).where(JobRecord.id == bad).values(spec={}, name="x" * 64)
        await session.execute(spoilt)
    settings = settings.model_copy(update={"keep_ended_jobs_s": 60.0})
    by_age = JobRemoval(store, CheckpointService(store, settings), settings)
    running, _ = await jobs.submit({"name": "running"})
    assert await by_age.expire(time.time()) == 0, "they have not ended long ago"
    await by_age.expire(time.time() + 120)
    async with store.read() as session:
        left = set(await session.scalars(select(JobRecord.id)))
    assert good not in left and running.id in left
