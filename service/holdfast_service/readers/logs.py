"""Reads log lines: a page of matching lines, or all matching lines as text.

A page takes a bounded time for any number of lines: a search that reaches its deadline returns its
position, and the client continues from there. The reader yields to other requests between chunks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any

from holdfast_service.job_model.lifecycle import State
from holdfast_service.job_model.log_filters import LogFilter
from holdfast_service.store import queries, series
from holdfast_service.store.engine import Store
from holdfast_service.store.job_lookup import read_job
from holdfast_service.store.series import LogSlice
from holdfast_service.views.history import LogLineView
from holdfast_service.views.pages import LogPage

SEARCH_S = 1.0
"""Longest search of a job's log lines; then the answer says how far it got."""
_TEXT_BYTES = 64 * 1024
"""Size of the parts of a download."""

NumberedLine = tuple[int, list[Any]]


class LogReader:
    """Reads the log lines of jobs. All calls raise JobNotFound."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def page(
        self,
        job_id: str,
        log_filter: LogFilter,
        *,
        after: int = 0,
        before: int | None = None,
        limit: int = 1000,
        tail: int | None = None,
    ) -> LogPage:
        """Matching lines with numbers above `after`; or the last matching lines: the last `tail`
        lines, or up to `limit` lines with numbers below `before`."""
        if tail is not None or before is not None:
            most = limit if tail is None else min(tail, limit)
            return await self._backwards(job_id, log_filter, after, before, most)
        found: list[NumberedLine] = []
        truncated, seen = False, after
        deadline = time.monotonic() + SEARCH_S
        async with read_job(self._store, job_id) as (session, job):
            newest = job.log_lines
            start = after
            if log_filter.since is not None:
                start = max(after, await series.line_before(session, job.id, log_filter.since))
            async with aclosing(series.read_log_chunks(session, job.id, start)) as chunks:
                async for part in chunks:
                    # Finds one extra line, to know whether there are more.
                    room = limit + 1 - len(found)
                    matching, seen, _ = await _filter(part, log_filter, room, deadline)
                    found += matching
                    truncated = len(found) > limit or time.monotonic() > deadline
                    if truncated:
                        break
                    await asyncio.sleep(0)
        if len(found) > limit:
            seen = found.pop()[0] - 1
        more = truncated and seen < newest
        # Skips the lines that the filter excluded: a follower would read them again and again.
        last = seen if more else max(after, newest)
        shown = tuple(queries.log_line_view(*line) for line in found)
        return LogPage(
            items=shown,
            next_cursor=str(last) if more else None,
            last_line=last,
            ended=not more and State(job.state).terminal,
        )

    async def text(
        self, job_id: str, log_filter: LogFilter, *, after: int = 0
    ) -> AsyncIterator[str]:
        """All matching lines as text, in parts; the job lookup happens before the first part."""
        async with read_job(self._store, job_id) as (session, job):
            start = after
            if log_filter.since is not None:
                start = max(after, await series.line_before(session, job.id, log_filter.since))
        return self._text(job.id, log_filter, start)

    async def _text(self, job_id: str, log_filter: LogFilter, after: int) -> AsyncGenerator[str]:
        """Uses one session per part, so that a slow client holds no database snapshot."""
        while True:
            texts: list[str] = []
            size, seen = 0, after
            deadline = time.monotonic() + SEARCH_S
            async with (
                self._store.read() as session,
                aclosing(series.read_log_chunks(session, job_id, after)) as chunks,
            ):
                async for part in chunks:
                    room = part.last - part.first + 1
                    matching, seen, _ = await _filter(part, log_filter, room, deadline)
                    texts += [_as_text(line) for _, line in matching]
                    size = sum(map(len, texts))
                    if size >= _TEXT_BYTES or time.monotonic() > deadline:
                        break
                    await asyncio.sleep(0)
            if texts:
                yield "".join(texts)
            if seen == after:
                return
            after = seen

    async def _backwards(
        self, job_id: str, log_filter: LogFilter, after: int, before: int | None, most: int
    ) -> LogPage:
        found: list[LogLineView] = []
        deadline = time.monotonic() + SEARCH_S
        first: int | None = None
        async with read_job(self._store, job_id) as (session, job):
            chunks = series.read_log_chunks(session, job.id, after, before=before, backwards=True)
            async with aclosing(chunks):
                async for part in chunks:
                    room = most - len(found)
                    matching, first, newest = await _filter(
                        part, log_filter, room, deadline, back=True
                    )
                    found += [queries.log_line_view(*line) for line in matching]
                    if len(found) == most or time.monotonic() > deadline:
                        break
                    if _search_is_over(newest, log_filter.since):
                        first = None
                        break
                    await asyncio.sleep(0)
        more = first is not None and first > after + 1
        return LogPage(
            items=tuple(reversed(found)),
            last_line=job.log_lines if before is None else max(after, before - 1),
            first_line=first if more else None,
            ended=before is None and State(job.state).terminal,
        )


FilteredLines = tuple[list[NumberedLine], int, float | None]
"""(matching lines, number of the last line examined, time of the newest line of the part); the time
is None if the part was skipped unread."""


async def _filter(
    part: LogSlice, log_filter: LogFilter, room: int, deadline: float, *, back: bool = False
) -> FilteredLines:
    """The first `room` matching lines of the part, or with `back` the last. Examines at least one
    line, and stops at the deadline (of `time.monotonic`).

    A regular expression runs in a thread; RE2 releases the interpreter lock there.
    """
    if log_filter.grep is None:
        return _filter_slice(part, log_filter, room, deadline, back)
    return await asyncio.to_thread(_filter_slice, part, log_filter, room, deadline, back)


def _filter_slice(
    part: LogSlice, log_filter: LogFilter, room: int, deadline: float, back: bool
) -> FilteredLines:
    end = max(part.first, part.after + 1) if back else _last(part)
    searched = log_filter.grep
    # A `since` bound needs the times of the lines, so the part must be read.
    if (
        searched is not None
        and log_filter.since is None
        and not searched.may_match_stored(part.stored)
    ):
        return [], end, None
    lines = part.lines()
    newest = max(line[0] for _, line in lines)
    if searched is not None and not searched.may_match_any([line[-1] for _, line in lines]):
        return [], end, newest
    found: list[NumberedLine] = []
    at = end
    for line in reversed(lines) if back else lines:
        at = line[0]
        if log_filter.matches(line[1]):
            found.append(line)
        if len(found) == room or time.monotonic() > deadline:
            break
    return found, at, newest


def _last(part: LogSlice) -> int:
    return part.last if part.before is None else min(part.last, part.before - 1)


def _search_is_over(newest: float | None, since: float | None) -> bool:
    """Whether all lines before this part were written before `since`."""
    return newest is not None and since is not None and series.ends_before(newest, since)


def _as_text(line: list[Any]) -> str:
    at, rank, attempt, _, _, stream, content = line
    when = datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
    shown_rank = "-" if rank is None else rank
    return f"{when} attempt={attempt} rank={shown_rank} {stream} {content}\n"
