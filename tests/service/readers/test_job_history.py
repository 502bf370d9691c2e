"""Pages of a job's history: events and metrics."""

from __future__ import annotations

import pytest
from tests.support.service.fake_cluster import row

from holdfast_service.errors import UnknownMetric
from holdfast_service.job_model.events.codec import UnknownEvent
from holdfast_service.job_model.log_filters import LogFilter
from holdfast_service.services.jobs import JobService
from holdfast_service.store import series
from holdfast_service.store.engine import Store
from holdfast_service.store.transaction import job_transaction


async def test_a_page_of_events_says_whether_more_can_follow(
    store: Store, jobs: JobService
) -> None:
    job, _ = await jobs.submit({"name": "x"})
    async with job_transaction(store, job.id) as tx:
        tx.emit(UnknownEvent("something", {"nan": float("nan"), "text": "nul \0 half \ud800"}))
    page = await jobs.history.events(job.id, after=1)
    assert [(event.seq, event.kind) for event in page.items] == [(2, "something")]
    assert page.items[0].data == {"nan": "NaN", "text": "nul \ufffd half ?"}
    assert not page.ended
    empty = await jobs.history.events(job.id, after=2)
    assert (empty.items, empty.last_seq, empty.ended) == ((), 2, False)
    assert not (await jobs.log_reader.page(job.id, LogFilter())).ended
    await jobs.cancel(job.id)
    assert not (await jobs.history.events(job.id, after=1, limit=1)).ended
    last = await jobs.history.events(job.id, after=2)
    assert last.ended
    assert (await jobs.history.events(job.id, after=last.last_seq)).ended
    assert (await jobs.log_reader.page(job.id, LogFilter())).ended


async def test_metrics_are_paged_and_thinned(store: Store, jobs: JobService) -> None:
    job, _ = await jobs.submit({"name": "x"})
    async with store.write() as session:
        await series.store_rows(session, job.id, [row(1, step) for step in range(1, 301)])
        await series.store_rows(session, job.id, [row(2, step) for step in range(200, 260)])
        await series.store_rows(session, job.id, [row(3, 301, loss=float("nan"))])
    seen: list[int] = []
    after: int | None = 0
    while after is not None:
        page = await jobs.history.metrics(job.id, ["loss", "tokens_per_second"], after, limit=70)
        seen += [point.step for point in page.items]
        after = None if page.next_cursor is None else int(page.next_cursor)
    assert seen == list(range(1, 302))
    thin = (await jobs.history.metrics(job.id, points=50, until_step=301)).items
    assert len(thin) <= 50
    assert (thin[-1].step, thin[-1].values["loss"]) == (301, None)
    later = (await jobs.history.metrics(job.id, after_step=199, limit=1)).items[0]
    assert (later.step, later.attempt) == (200, 2)
    with pytest.raises(UnknownMetric):
        await jobs.history.metrics(job.id, ["lozz"])
