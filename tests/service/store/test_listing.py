"""Job lists: filtered, sorted, counted and paged."""

from __future__ import annotations

import base64
import json
import time

import pytest
import uuid_utils
from sqlalchemy import insert, select

from holdfast_service.errors import InvalidCursor
from holdfast_service.job_model.lifecycle import State
from holdfast_service.job_model.sort_order import Sort
from holdfast_service.services.jobs import JobService
from holdfast_service.services.overview import Overview
from holdfast_service.store.engine import Store
from holdfast_service.store.listing import Filters
from holdfast_service.store.models import JobRecord
from holdfast_service.store.transaction import job_transaction


async def submitted(jobs: JobService, name: str, owner: str | None = None) -> str:
    labels = {} if owner is None else {"labels": {"owner": owner}}
    return (await jobs.submit({"name": name, **labels}))[0].id


async def names(overview: Overview, **query: object) -> list[str]:
    found = await overview.rows(Filters(**query))  # type: ignore[arg-type]
    return [row.name for row in found.items]


async def test_a_search_matches_names_owners_and_id_prefixes(
    jobs: JobService, overview: Overview
) -> None:
    first = await submitted(jobs, "Llama-7b", "ada")
    await submitted(jobs, "llama_70b", "bob")
    await submitted(jobs, "bert")
    assert await names(overview, q="LLAMA") == ["llama_70b", "Llama-7b"]
    assert await names(overview, q="a_7") == ["llama_70b"]  # the underscore is not a wildcard
    assert await names(overview, q="%") == []
    assert await names(overview, q="ad") == ["Llama-7b"]
    assert await names(overview, q=first) == ["Llama-7b"]
    assert await names(overview, owner="bob") == ["llama_70b"]
    assert await names(overview, q="\0\ud800") == []


async def test_counts_cover_all_states_and_the_total_only_the_requested(
    jobs: JobService, overview: Overview
) -> None:
    ids = [await submitted(jobs, f"j{n}") for n in range(5)]
    for job_id in ids[:2]:
        await jobs.cancel(job_id)
    page = await overview.rows(Filters(states=frozenset({State.CANCELLED})), limit=1)
    assert page.counts == {State.QUEUED: 3, State.CANCELLED: 2}
    assert (page.total, len(page.items)) == (2, 1)
    assert page.next_cursor is not None


@pytest.mark.parametrize("sort", list(Sort))
async def test_paging_in_every_order_has_no_gaps_or_repeats(
    jobs: JobService, overview: Overview, store: Store, sort: Sort
) -> None:
    ids = [await submitted(jobs, f"j{n % 3}") for n in range(7)]
    for number, job_id in enumerate(ids[:4]):
        async with job_transaction(store, job_id) as tx:
            tx.job.goodput = [0.5, 0.25, 0.5, 0.75][number]
            tx.job.productive_s = 1000.0
    await jobs.cancel(ids[5])
    seen: list[str] = []
    cursor = None
    for _ in range(20):
        page = await overview.rows(sort=sort, limit=2, cursor=cursor)
        seen += [row.id for row in page.items]
        cursor = page.next_cursor
        if cursor is None:
            break
    assert sorted(seen) == sorted(ids)
    match sort:
        case Sort.CREATED:
            assert seen == ids[::-1]
        case Sort.NAME:
            assert seen == [ids[n] for n in (6, 3, 0, 4, 1, 5, 2)]
        case Sort.STATE:
            assert seen[-1] == ids[5]
        case Sort.GOODPUT:
            assert seen[:4] == [ids[1], ids[2], ids[0], ids[3]]


async def test_jobs_that_have_just_started_do_not_lead_the_order_by_goodput(
    jobs: JobService, overview: Overview, store: Store
) -> None:
    stats = {  # goodput, productive and starting time
        "bad": (0.7, 700.0, 20.0),
        "good": (0.98, 980.0, 20.0),
        "starts": (0.1, 5.0, 45.0),
        "starts slowly": (0.6, 1800.0, 1200.0),
        "no step": (0.0, 0.0, 0.0),
        "unknown": (None, 0.0, 0.0),
    }
    for name, (goodput, productive_s, starting_s) in stats.items():
        async with job_transaction(store, await submitted(jobs, name.replace(" ", "-"))) as tx:
            tx.job.goodput, tx.job.productive_s = goodput, productive_s
            tx.job.starting_s = starting_s
    rows = (await overview.rows(sort=Sort.GOODPUT)).items
    assert [(row.name, row.goodput_settled) for row in rows] == [
        ("bad", True),
        ("good", True),
        ("no-step", False),
        ("starts-slowly", False),
        ("starts", False),
        ("unknown", False),
    ]


async def test_a_cursor_of_another_order_is_rejected(jobs: JobService, overview: Overview) -> None:
    for n in range(3):
        await submitted(jobs, f"j{n}")
    of_names = (await overview.rows(sort=Sort.NAME, limit=1)).next_cursor
    for cursor in (of_names, "x", "", "ä", "W10", "WyJjcmVhdGVkIixudWxsLDVd"):
        with pytest.raises(InvalidCursor):
            await overview.rows(cursor=cursor)
    states = ["state", 10**30, "x"], ["state", -(10**30), "x"], ["state", True, "x"]
    for fields in states:
        cursor = base64.urlsafe_b64encode(json.dumps(fields).encode()).decode()
        with pytest.raises(InvalidCursor):
            await overview.rows(sort=Sort.STATE, cursor=cursor)


@pytest.mark.parametrize(
    "spec", [{}, {"resources": None}, {"resources": {"workers_per_node": 0}, "parallel": {}}]
)
async def test_an_unreadable_spec_affects_only_its_own_job(
    jobs: JobService, overview: Overview, store: Store, spec: dict[str, object]
) -> None:
    job = await submitted(jobs, "of-another-version")
    async with job_transaction(store, job) as tx:
        tx.job.spec = spec
        tx.job.state = State.RUNNING
    assert (await overview.cluster()).capacity.cpus == 0
    assert (await overview.verdict(job)).headline == "Training"


@pytest.mark.slow
async def test_the_time_of_a_listing_grows_with_the_jobs_not_with_their_square(
    jobs: JobService, overview: Overview, store: Store
) -> None:
    await submitted(jobs, "first", "ada")
    queries = [
        (Filters(), Sort.CREATED),
        (Filters(q="JOB-1999"), Sort.NAME),
        (Filters(states=frozenset({State.RUNNING})), Sort.GOODPUT),
        (Filters(owner="ada"), Sort.STATE),
    ]

    async def shortest_s(filters: Filters, sort: Sort) -> float:
        times = []
        for _ in range(5):
            began = time.process_time()
            await overview.rows(filters, sort=sort)
            times.append(time.process_time() - began)
        return min(times)

    await _add_jobs(store, 0, 2_000)
    few = [await shortest_s(*query) for query in queries]
    await _add_jobs(store, 2_000, 20_000)
    for query, of_few_s in zip(queries, few, strict=True):
        page = await overview.rows(query[0], sort=query[1])
        assert page.total >= 11 and len(page.items) >= 11
        assert await shortest_s(*query) < 40 * of_few_s, query  # ten times as many jobs


async def _add_jobs(store: Store, first_number: int, end: int) -> None:
    states = [State.SUCCEEDED, State.RUNNING, State.FAILED, State.QUEUED]
    async with store.write() as session:
        first = dict((await session.execute(select(JobRecord.__table__))).mappings().first() or {})
        for start in range(first_number, end, 2_000):
            rows = [
                {
                    **first,
                    "id": str(uuid_utils.uuid7()),
                    "name": f"job-{n}",
                    "state": states[n % 4],
                    "goodput": n / 20_000,
                }
                for n in range(start, start + 2_000)
            ]
            await session.execute(insert(JobRecord), rows)
