"""Log lines for readers: a page of those that match, or all of them as text.

However much there is, a page costs a bounded time: a search that finds little within it says how
far it came, and is gone on with from there. Between two chunks other requests have their turn.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any

from holdfast_service.job_model.log_filters import LogFilter
from holdfast_service.settings import Settings
from holdfast_service.store import queries, series
from holdfast_service.store.engine import Store
from holdfast_service.store.job_lookup import find_job
from holdfast_service.store.series import LogPart
from holdfast_service.views.jobs import LogLineView, LogPage

_TEXT_BYTES = 64 * 1024
"""Of a download that are sent together."""

NumberedLine = tuple[int, list[Any]]


class LogReader:
    """Calls raise JobNotFound."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store = store
        self._settings = settings

    async def page(
        self,
        job_id: str,
        wanted: LogFilter,
        *,
        after: int = 0,
        before: int | None = None,
        limit: int = 1000,
        tail: int | None = None,
    ) -> LogPage:
        """Lines with a number above `after`; or the last ones that match: `tail` of them, or
        `limit` of those with a number below `before`."""
        if tail is not None or before is not None:
            most = limit if tail is None else min(tail, limit)
            return await self._backwards(job_id, wanted, after, before, most)
        found: list[NumberedLine] = []
        cut, seen = False, after
        deadline = self._deadline()
        async with self._store.read() as session:
            job = await find_job(session, job_id)
            newest = job.log_lines
            start = after
            if wanted.since is not None:
                start = max(after, await series.line_before(session, job.id, wanted.since))
            async with aclosing(series.read_log_chunks(session, job.id, start)) as chunks:
                async for part in chunks:
                    # One more than is shown: whether there are more.
                    room = limit + 1 - len(found)
                    some, seen, _ = await _sift(part, wanted, room, deadline)
                    found += some
                    cut = len(found) > limit or time.monotonic() > deadline
                    if cut:
                        break
                    await asyncio.sleep(0)
        if len(found) > limit:
            seen = found.pop()[0] - 1
        more = cut and seen < newest
        # Past what the filter left out too: a follower would read it again and again.
        last = seen if more else max(after, newest)
        shown = tuple(queries.log_line_view(*line) for line in found)
        return LogPage(lines=shown, last_line=last, more=more)

    async def text(self, job_id: str, wanted: LogFilter, *, after: int = 0) -> AsyncIterator[str]:
        """All lines that match, as text, in parts; the job is looked for before the first one."""
        async with self._store.read() as session:
            job = await find_job(session, job_id)
            start = after
            if wanted.since is not None:
                start = max(after, await series.line_before(session, job.id, wanted.since))
        return self._text(job.id, wanted, start)

    async def _text(self, job_id: str, wanted: LogFilter, after: int) -> AsyncGenerator[str]:
        """A session for each part: a slow reader holds no snapshot of the store."""
        while True:
            said: list[str] = []
            size, seen = 0, after
            deadline = self._deadline()
            async with (
                self._store.read() as session,
                aclosing(series.read_log_chunks(session, job_id, after)) as chunks,
            ):
                async for part in chunks:
                    room = part.last - part.first + 1
                    some, seen, _ = await _sift(part, wanted, room, deadline)
                    said += [_as_text(line) for _, line in some]
                    size = sum(map(len, said))
                    if size >= _TEXT_BYTES or time.monotonic() > deadline:
                        break
                    await asyncio.sleep(0)
            if said:
                yield "".join(said)
            if seen == after:
                return
            after = seen

    async def _backwards(
        self, job_id: str, wanted: LogFilter, after: int, before: int | None, most: int
    ) -> LogPage:
        found: list[LogLineView] = []
        deadline = self._deadline()
        first: int | None = None
        async with self._store.read() as session:
            job = await find_job(session, job_id)
            chunks = series.read_log_chunks(session, job.id, after, before=before, backwards=True)
            async with aclosing(chunks):
                async for part in chunks:
                    room = most - len(found)
                    some, first, newest = await _sift(part, wanted, room, deadline, back=True)
                    found += [queries.log_line_view(*line) for line in some]
                    if len(found) == most or time.monotonic() > deadline:
                        break
                    if _ends(newest, wanted.since):
                        first = None
                        break
                    await asyncio.sleep(0)
        more = first is not None and first > after + 1
        return LogPage(
            lines=tuple(reversed(found)),
            last_line=job.log_lines if before is None else max(after, before - 1),
            more=False,
            first_line=first if more else None,
        )

    def _deadline(self) -> float:
        return time.monotonic() + self._settings.log_search_s


Sifted = tuple[list[NumberedLine], int, float | None]
"""Lines that match, the number of the last one that was looked at, and when the newest line of the
part was written, where the part had to be read for it."""


async def _sift(
    part: LogPart, wanted: LogFilter, room: int, deadline: float, *, back: bool = False
) -> Sifted:
    """The first `room` lines that match, or the last of them: of one line at least, and of no more
    after the deadline (of `time.monotonic`).

    An expression runs in a thread, where RE2 keeps nobody else from the interpreter.
    """
    if wanted.grep is None:
        return _sifted(part, wanted, room, deadline, back)
    return await asyncio.to_thread(_sifted, part, wanted, room, deadline, back)


def _sifted(part: LogPart, wanted: LogFilter, room: int, deadline: float, back: bool) -> Sifted:
    end = max(part.first, part.after + 1) if back else _last(part)
    searched = wanted.grep
    # A bound in time needs the times of lines, so the part is read.
    if searched is not None and wanted.since is None and not searched.may_be_stored(part.stored):
        return [], end, None
    lines = part.lines()
    newest = max(line[0] for _, line in lines)
    if searched is not None and not searched.may_be_in([line[-1] for _, line in lines]):
        return [], end, newest
    found: list[NumberedLine] = []
    at = end
    for line in reversed(lines) if back else lines:
        at = line[0]
        if wanted.lets_through(line[1]):
            found.append(line)
        if len(found) == room or time.monotonic() > deadline:
            break
    return found, at, newest


def _last(part: LogPart) -> int:
    return part.last if part.before is None else min(part.last, part.before - 1)


def _ends(newest: float | None, since: float | None) -> bool:
    """Whether nothing before this part was written at `since` or later."""
    return newest is not None and since is not None and series.ends_before(newest, since)


def _as_text(line: list[Any]) -> str:
    at, rank, attempt, _, _, stream, said = line
    when = datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
    who = "-" if rank is None else rank
    return f"{when} attempt={attempt} rank={who} {stream} {said}\n"
