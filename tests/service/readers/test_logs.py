"""Log lines are searched forwards and backwards by their content, in bounded time."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
from tests.support.service.fake_cluster import line
from tests.support.service.job_drives import until
from tests.support.waiting import DEADLINE_S

from holdfast_service.errors import InvalidRegex
from holdfast_service.job_model.log_filters import (
    LogFilter,
    LogPattern,
    compile_pattern,
)
from holdfast_service.job_model.log_levels import LogLevel, level_of
from holdfast_service.readers import logs
from holdfast_service.services.jobs import JobService
from holdfast_service.store import series
from holdfast_service.store.engine import Store
from holdfast_service.store.json_safe import to_json
from holdfast_service.store.transaction import job_transaction


async def job_with_lines(store: Store, jobs: JobService, count: int, each: int = 400) -> str:
    job, _ = await jobs.submit({"name": "x"})
    for start in range(1, count + 1, each):
        async with job_transaction(store, job.id) as tx:
            lines = [
                replace(line(n, f"{'ERROR' if n % 10 == 0 else 'INFO'} line {n}", rank=n % 4))
                for n in range(start, min(start + each, count + 1))
            ]
            await series.store_logs(tx.session, tx.job, lines)
    return job.id


async def test_lines_are_found_by_rank_level_time_and_expression(
    store: Store, jobs: JobService
) -> None:
    job = await job_with_lines(store, jobs, 1200)
    reader = jobs.log_reader

    async def found(log_filter: LogFilter, **query: int) -> list[int]:
        return [line.line for line in (await reader.page(job, log_filter, **query)).items]

    assert await found(LogFilter(grep=compile_pattern(r"line 11\d$"))) == list(range(110, 120))
    assert await found(LogFilter(level=LogLevel.WARNING), limit=3) == [10, 20, 30]
    assert await found(LogFilter(rank=2, level=LogLevel.ERROR), limit=2) == [10, 30]
    assert (await found(LogFilter(since=1000.0 + 1190)))[0] == 1190
    assert await found(LogFilter(since=1000.0 + 10, until=1000.0 + 12)) == [10, 11, 12]
    assert await found(LogFilter(), after=1197) == [1198, 1199, 1200]
    assert await found(LogFilter(), tail=2) == [1199, 1200]


async def test_a_line_that_is_too_long_says_how_much_is_missing(
    store: Store, jobs: JobService
) -> None:
    job, _ = await jobs.submit({"name": "x"})
    async with job_transaction(store, job.id) as tx:
        whole, longer = "x" * series.MAX_LINE_LENGTH, "x" * (series.MAX_LINE_LENGTH + 1234)
        await series.store_logs(tx.session, tx.job, [line(1, whole), line(2, longer)])
    items = (await jobs.log_reader.page(job.id, LogFilter())).items
    assert [item.text for item in items] == [whole, f"{whole}... (1,234 characters left out)"]


async def test_backward_pages_have_no_gaps(store: Store, jobs: JobService) -> None:
    job = await job_with_lines(store, jobs, 1100)
    log_filter = LogFilter(grep=compile_pattern("line .*[05]$"))
    seen: list[int] = []
    before: int | None = 1050
    while before is not None:
        page = await jobs.log_reader.page(job, log_filter, before=before, limit=17)
        seen = [line.line for line in page.items] + seen
        before = page.first_line
    assert seen == [n for n in range(1, 1050) if n % 5 == 0]


async def test_backward_pages_reach_the_first_line(store: Store, jobs: JobService) -> None:
    job = await job_with_lines(store, jobs, 5)
    page = await jobs.log_reader.page(job, LogFilter(), before=5, limit=3)
    assert ([line.line for line in page.items], page.first_line) == ([2, 3, 4], 2)
    page = await jobs.log_reader.page(job, LogFilter(), before=2, limit=3)
    assert ([line.line for line in page.items], page.first_line) == ([1], None)


async def test_a_slow_search_returns_its_position(
    store: Store, jobs: JobService, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = await job_with_lines(store, jobs, 60, each=20)
    monkeypatch.setattr(logs, "SEARCH_S", 1e-6)
    after, rounds, seen = 0, 0, 0
    while True:
        page = await jobs.log_reader.page(
            job, LogFilter(grep=compile_pattern("line 60$")), after=after
        )
        assert page.last_line > after
        after, rounds, seen = page.last_line, rounds + 1, seen + len(page.items)
        if not page.next_cursor:
            break
    assert (seen, after) == (1, 60)
    assert rounds > 2


class SlowExpression(LogPattern):
    """Blocks until it is allowed to end, like an expensive expression on long lines."""

    def __init__(self) -> None:
        super().__init__(None)
        self.began = threading.Event()
        self.may_end = threading.Event()

    def search(self, content: str) -> bool:
        self.began.set()
        return self.may_end.wait(DEADLINE_S)


async def test_the_loop_is_not_blocked_while_an_expression_runs(
    store: Store, jobs: JobService
) -> None:
    job = await job_with_lines(store, jobs, 3)
    for query in ({}, {"tail": 3}):
        slow = SlowExpression()
        page = asyncio.create_task(jobs.log_reader.page(job, LogFilter(grep=slow), **query))
        await until(slow.began.is_set)
        slow.may_end.set()
        assert [line.line for line in (await page).items] == [1, 2, 3]


async def test_late_lines_do_not_end_a_backward_search(store: Store, jobs: JobService) -> None:
    job, _ = await jobs.submit({"name": "x"})
    times = [10_000.0] * 500 + [100.0] + [10_001.0] * 99  # a chunk starts with the late line
    lines = [replace(line(n, "said"), at=at) for n, at in enumerate(times, 1)]
    async with job_transaction(store, job.id) as tx:
        await series.store_logs(tx.session, tx.job, lines)
    late = LogFilter(since=9_999.0)
    assert len((await jobs.log_reader.page(job.id, late, tail=1_000)).items) == 599
    assert len((await jobs.log_reader.page(job.id, late)).items) == 599


async def test_a_backward_search_reads_nothing_before_its_earliest_time(
    store: Store, jobs: JobService, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = await job_with_lines(store, jobs, 1500)
    read: list[int] = []
    read_all = series.read_log_chunks

    async def counted(*args: Any, **options: Any) -> AsyncGenerator[series.LogSlice, None]:
        async with aclosing(read_all(*args, **options)) as chunks:
            async for part in chunks:
                read.append(part.first)
                yield part

    monkeypatch.setattr(series, "read_log_chunks", counted)
    recent = LogFilter(grep=compile_pattern("absent"), since=1e6)
    assert (await jobs.log_reader.page(job, recent, tail=10)).items == ()
    assert len(read) == 1


async def test_a_download_contains_every_matching_line(store: Store, jobs: JobService) -> None:
    job = await job_with_lines(store, jobs, 1200)
    parts = [part async for part in await jobs.log_reader.text(job, LogFilter(rank=1))]
    lines = "".join(parts).splitlines()
    assert len(lines) == 300
    assert lines[0] == "1970-01-01T00:16:41.000+00:00 attempt=1 rank=1 stdout INFO line 1"


def test_no_expression_takes_long() -> None:
    evil = compile_pattern("(a*)*(a|aa)+$")  # for ever where a search may go back
    LogFilter(grep=evil).matches([0.0, 0, 1, "", "", "stdout", "a" * 16_000 + "b"])


@pytest.mark.parametrize("expression", ["(", "a{1000}{1000}", r"(?=x)", "x" * 501, "\ud800"])
def test_an_invalid_expression_is_rejected(expression: str) -> None:
    with pytest.raises(InvalidRegex):
        compile_pattern(expression)


@pytest.mark.parametrize(
    ("content", "level"),
    [
        ("2026-01-01 12:00:00 ERROR boom", LogLevel.ERROR),
        ("[warning] slow", LogLevel.WARNING),
        ("level=debug x", LogLevel.DEBUG),
        ("W0101 12:00:00.1 pid] x", LogLevel.WARNING),
        ("Traceback (most recent call last):", LogLevel.ERROR),
        ("ValueError: no", LogLevel.ERROR),
        ("for your info only", None),
        ("step 3", None),
    ],
)
def test_the_level_is_parsed_from_a_line(content: str, level: LogLevel | None) -> None:
    assert level_of(content) is level


@pytest.mark.parametrize(
    "expression",
    [
        r"^a$",
        r"\Ab\z",
        "(?i)B",
        "[^x]$",
        r"\bfoo\b",
        "a|^b",
        "",
        r"(?-i)a$",
        "(?s)b.*",
        r"\Qa.\E",
        '"q"',
        "ü",
        r"\t",
        "x*$",
    ],
)
def test_a_chunk_is_skipped_only_if_no_line_matches(expression: str) -> None:
    searched = compile_pattern(expression)
    assert searched is not None
    lines = [
        "a",
        "b",
        "",
        "foo bar",
        "xfoo",
        "ba",
        "a.",
        "two\nlines",
        "x",
        'say "q"',
        "grün",
        "a\tb",
    ]
    for pair in itertools.product(lines, repeat=2):
        if any(searched.search(content) for content in pair):
            assert searched.may_match_any(pair), pair
            stored = to_json([[1.0, 0, 1, "n0", "w", "output", content] for content in pair])
            assert searched.may_match_stored(stored), pair
    nowhere = compile_pattern("nowhere")
    assert nowhere is not None and not nowhere.may_match_any(lines)
    assert not nowhere.may_match_stored(to_json([[1.0, 0, 1, "n0", "w", "output", "here"]]))
