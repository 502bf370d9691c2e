"""Rank times are stored in bounded space, and are read in the form of a heatmap."""

from __future__ import annotations

import time
from base64 import b64decode
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sqlalchemy import event, func, select
from tests.support.service.fake_cluster import FakeCluster, row
from tests.support.service.job_drives import reconciling, submitted, until

from holdfast_service.job_model.supervisor_protocol import Phase
from holdfast_service.readers.ranks import RankHistoryQuery
from holdfast_service.services.jobs import JobService
from holdfast_service.services.nodes import NodeService
from holdfast_service.services.overview import Overview
from holdfast_service.settings import Settings
from holdfast_service.store import rank_series
from holdfast_service.store.engine import Store
from holdfast_service.store.models import AttemptMember, AttemptRow, RankChunk
from holdfast_service.views.ranks import RankMeasure
from holdfast_workers.protocol.messages import Beat, StepRow


def step(number: int, at: float, *compute_s: float) -> StepRow:
    return replace(row(1, number), at=at, compute_s=compute_s, step_time_s=1.0)


async def test_a_bucket_holds_the_mean_in_any_arrival_order(store: Store, jobs: JobService) -> None:
    job, _ = await jobs.submit({"name": "x"})
    rows = [step(1, 1000.1, 1.0, 2.0), step(2, 1000.5, 3.0, 2.0), step(3, 1001.5, 5.0, 6.0)]
    for part in (rows[:1], rows[1:], []):
        async with store.write() as session:
            await rank_series.store_rows(session, job.id, part)
    async with store.read() as session:
        found = await rank_series.read(session, job.id, 1000.0, 1002.0)
    assert found is not None and found.width_s == 1
    first = 1000 - found.since
    assert found.compute[first].tolist() == [2.0, 2.0]
    assert found.compute[first + 1].tolist() == [5.0, 6.0]
    assert np.isnan(found.compute[first + 2]).all()


async def test_a_long_job_has_bounded_space_and_keeps_all_steps(
    store: Store, jobs: JobService
) -> None:
    job, _ = await jobs.submit({"name": "x"})
    hour = 3600.0
    for start in range(0, 40):
        at = 1e6 + start * hour
        async with store.write() as session:
            rows = [step(start * 4 + n, at + n * 60, 1.0 + start, 2.0) for n in range(4)]
            await rank_series.store_rows(session, job.id, rows)
    async with store.read() as session:
        chunks = await session.scalar(select(func.count()).select_from(RankChunk))
        counts = await session.scalars(select(RankChunk.counts))
        found = await rank_series.read(session, job.id, 0.0, 1e9)
        total = sum(sum(buckets) for buckets in counts)
    assert chunks is not None and chunks <= rank_series.MAX_CHUNKS
    assert total == 160
    assert found is not None
    assert np.nanmin(found.compute[:, 0]) == 1.0
    assert np.nanmax(found.compute[:, 0]) == 40.0


@pytest.mark.parametrize(("later", "width_s"), [(0, 1), (1, 2)])
async def test_buckets_become_wider_with_the_first_chunk_too_many(
    store: Store, jobs: JobService, later: int, width_s: int
) -> None:
    job, _ = await jobs.submit({"name": "x"})
    began = 1000.0 * rank_series.BUCKETS
    last = began + rank_series.MAX_CHUNKS * rank_series.BUCKETS - 1 + later
    async with store.write() as session:
        await rank_series.store_rows(session, job.id, [step(1, began, 1.0)])
        await rank_series.store_rows(session, job.id, [step(2, last, 1.0)])
    async with store.read() as session:
        found = await rank_series.read(session, job.id, began, last + 1)
    assert found is not None and found.width_s == width_s


async def test_a_growing_world_keeps_earlier_times(store: Store, jobs: JobService) -> None:
    job, _ = await jobs.submit({"name": "x"})
    async with store.write() as session:
        await rank_series.store_rows(session, job.id, [step(1, 1000.1, 1.0, 2.0)])
        await rank_series.store_rows(session, job.id, [step(2, 1001.1, 1.0, 2.0, 3.0)])
    async with store.read() as session:
        found = await rank_series.read(session, job.id, 1000.0, 1002.0)
    assert found is not None and found.compute.shape[1] == 3
    assert np.isnan(found.compute[1000 - found.since, 2])


async def test_slow_and_silent_ranks_are_visible(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    overview = Overview(store, NodeService(store), settings)
    now = time.time()
    async with reconciling(store, cluster, settings):
        supervisor = await submitted(jobs, cluster)
        supervisor.form(1)
        supervisor.enter(Phase.RUNNING)
        supervisor.step = 3
        supervisor.rows = [step(n, now + n, 0.1, 0.1, 0.1, 0.3) for n in (1, 2, 3)]
        supervisor.beats = [
            Beat(rank, f"w{rank}", 1, 1, 4 - (rank == 3), "backward", 0, 0.5, 9.0)
            for rank in range(4)
        ]
        job_id = supervisor.launch.job_id

        async def has_states() -> bool:
            return (await overview.ranks(job_id)).at is not None

        await until(has_states)
        found = await overview.ranks(job_id)
        assert (found.front_step, found.attempt) == (4, 1)
        assert [rank.lag_steps for rank in found.ranks] == [0, 0, 0, 1]
        assert [rank.slow_factor for rank in found.ranks] == [1.0, 1.0, 1.0, 3.0]
        assert found.ranks[3].silent_s == 0.5
        assert found.ranks[3].coordinates == {"dp_shard": 1, "tp": 1}
        history = await overview.rank_history(job_id, RankHistoryQuery(now, now + 6, buckets=6))
        assert [rank.rank for rank in history.ranks] == [0, 1, 2, 3]
        assert history.ranks[2].workers == ("n1.a.2",)
        seen = {value for value in history.values[3] if value is not None}
        assert len(seen) == 1 and abs(seen.pop() - 0.3) < 1e-3
        lag = await overview.rank_history(
            job_id, RankHistoryQuery(now, now + 6, of=RankMeasure.LAG)
        )
        assert max(value or 0 for value in lag.values[3]) > 0.19
        assert max(value or 0 for value in lag.values[0]) == 0
        detail = await overview.rank(job_id, 3)
        assert detail.now == found.ranks[3]
        assert [worker.worker for worker in detail.workers] == ["n1.a.3"]


async def test_ranks_of_a_program_that_report_no_step_are_not_behind(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    """Only its first rank reports; the job resumed from step 3."""
    overview = Overview(store, NodeService(store), settings)
    async with reconciling(store, cluster, settings):
        supervisor = await submitted(
            jobs, cluster, command="python train.py", parallel={"dp_shard": 4}
        )
        supervisor.form(1, restore_step=3)
        supervisor.enter(Phase.RUNNING)
        supervisor.beats = [
            Beat(rank, f"w{rank}", 1, 1, 3 if rank else 7, "program", 0, 0.5, 9.0)
            for rank in range(4)
        ]
        job_id = supervisor.launch.job_id

        async def has_states() -> bool:
            return (await overview.ranks(job_id)).at is not None

        await until(has_states)
        found = await overview.ranks(job_id)
    assert found.front_step == 7
    shown = [(rank.step, rank.lag_steps) for rank in found.ranks]
    assert shown == [(7, 0), (None, None), (None, None), (None, None)]


async def test_a_thousand_ranks_are_read_with_as_few_statements_as_a_few(
    store: Store, jobs: JobService, settings: Settings
) -> None:
    overview, start = Overview(store, NodeService(store), settings), time.time()
    counts = []
    for ranks in (8, 1024):
        job, _ = await jobs.submit({"name": "x"})
        async with store.write() as session:
            rows = [
                step(n, start + n, *(0.1 + 0.001 * (r % 7) for r in range(ranks)))
                for n in range(400)
            ]
            await rank_series.store_rows(session, job.id, rows)
        query = RankHistoryQuery(start, start + 400, buckets=200)
        executed: list[str] = []

        def count(_connection: Any, _cursor: Any, text: str, *_: Any) -> None:
            executed.append(text)  # noqa: B023

        event.listen(store._engine.sync_engine, "before_cursor_execute", count)
        found = await overview.rank_history(job.id, query)
        event.remove(store._engine.sync_engine, "before_cursor_execute", count)
        assert len(found.values) == ranks and len(found.values[0]) == 200
        counts.append(len(executed))
    assert 0 < counts[1] <= counts[0], counts


async def test_a_heatmap_has_the_same_values_as_the_history(
    store: Store, jobs: JobService, settings: Settings
) -> None:
    job, _ = await jobs.submit({"name": "x"})
    start = 1000.0
    async with store.write() as session:
        await rank_series.store_rows(session, job.id, [step(1, start + 0.5, 0.25, 0.125)])
        await rank_series.store_rows(session, job.id, [step(2, start + 2.5, 0.5, 0.125, 2.0)])
        for attempt, hosts in ((1, ("a", "a")), (2, ("b", "b"))):
            session.add(world(job.id, attempt, start + attempt, len(hosts)))
            session.add_all(member(job.id, attempt, rank, host) for rank, host in enumerate(hosts))
    overview = Overview(store, NodeService(store), settings)
    query = RankHistoryQuery(start, start + 4, buckets=4)
    history = await overview.rank_history(job.id, query)
    heat = await overview.heat(job.id, query)
    values = np.frombuffer(b64decode(heat.values), "<f2").reshape(-1, heat.buckets)
    assert [[None if np.isnan(value) else value for value in row] for row in values.tolist()] == [
        list(row) for row in history.values
    ]
    assert heat.ranks == tuple(rank.rank for rank in history.ranks) == (0, 1)
    nodes = [heat.nodes[index] for index in heat.node_of]
    assert nodes == [rank.node for rank in history.ranks]
    glance = await overview.glance(job.id, query)
    assert glance.heat == heat
    assert glance.job == await jobs.get(job.id)
    assert glance.timeline.spans[0].since == glance.job.created_at
    assert glance.verdict.headline == (await overview.verdict(job.id)).headline


def world(job_id: str, number: int, forming_at: float, size: int) -> AttemptRow:
    return AttemptRow(
        job_id=job_id,
        number=number,
        state="running",
        mesh={"dp_shard": size},
        world_size=size,
        standbys=[],
        restore={},
        joined={},
        forming_at=forming_at,
    )


def member(job_id: str, attempt: int, rank: int, host: str) -> AttemptMember:
    return AttemptMember(
        job_id=job_id,
        attempt=attempt,
        rank=rank,
        worker=f"{host}.{rank}",
        agent=host,
        node_id=f"id-{host}",
        host=host,
        pid=None,
        role="worker",
    )
