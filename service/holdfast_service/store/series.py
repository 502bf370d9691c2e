"""Metrics, digests and log lines: in chunks, idempotent, with the committed history on top.

A step belongs to the window `(step - 1) // WINDOW`; a chunk holds the rows of one attempt in one
window. When attempts overlap, because a recovery computed steps again, the later one's row is
the history. Storing what is stored already changes nothing.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Integer, Text, and_, bindparam, cast, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_service.job_model.goodput import History
from holdfast_service.store.downsampling import OWN, outline
from holdfast_service.store.json_safe import number, text
from holdfast_service.store.models import DigestChunk, Job, LogChunk, MetricChunk
from holdfast_service.store.statement import JOB, Put, Statement
from holdfast_workers.protocol.messages import LogLine, StepRow

WINDOW = 128
LINES_PER_CHUNK = 500
CHARACTERS_PER_CHUNK = 64 * 1024
LONGEST_LINE = 16 * 1024
_CHUNKS_READ = 8
"""Chunks that are fetched together."""
_LAST_CHUNKS_READ = 2
"""The same from the newest down: who asks for the last lines wants few."""
_CLOCKS_DIFFER_S = 60.0
COLUMNS = (
    "at",
    "loss",
    "grad_norm",
    "lr",
    "tokens",
    "step_time_s",
    "loader_wait_s",
    "samples",
    "protected_step",
    "checkpoint_wait_s",
    OWN,
)
"""What is kept of a StepRow beside its step and attempt, in this order. Append only."""


_OWN = COLUMNS.index(OWN)
_PUT_ROWS, _PUT_DIGESTS, _PUT_LINES = Put(MetricChunk), Put(DigestChunk), Put(LogChunk)
_STORED = Statement(
    select(MetricChunk.rows).where(
        MetricChunk.job_id == JOB,
        MetricChunk.window == bindparam("window"),
        MetricChunk.attempt == bindparam("attempt"),
    )
)
_DIGESTS = Statement(
    select(DigestChunk.digests).where(
        DigestChunk.job_id == JOB, DigestChunk.window == bindparam("window")
    )
)
_DIGESTS_FROM = Statement(
    select(DigestChunk).where(DigestChunk.job_id == JOB, DigestChunk.window >= bindparam("window"))
)
_LAST_LINES = Statement(
    select(LogChunk.first, LogChunk.last, LogChunk.lines)
    .where(LogChunk.job_id == JOB)
    .order_by(LogChunk.first.desc())
    .limit(1)
)
_MOST = bindparam("most", type_=Integer)
_ROWS = Statement(
    select(MetricChunk.window, MetricChunk.attempt, MetricChunk.rows)
    .where(
        MetricChunk.job_id == JOB,
        or_(
            MetricChunk.window > bindparam("window"),
            and_(
                MetricChunk.window == bindparam("window"),
                MetricChunk.attempt > bindparam("attempt"),
            ),
        ),
    )
    .order_by(MetricChunk.window, MetricChunk.attempt)
    .limit(_MOST)
)
_START = Statement(
    select(func.max(LogChunk.first)).where(
        LogChunk.job_id == JOB, LogChunk.first <= bindparam("line")
    )
)
_LINES = select(LogChunk.first, LogChunk.last, cast(LogChunk.lines, Text).label("lines")).where(
    LogChunk.job_id == JOB,
    LogChunk.first >= bindparam("low"),
    LogChunk.first < bindparam("high"),
    LogChunk.last > bindparam("after"),
)
_LINES_UP = Statement(_LINES.order_by(LogChunk.first).limit(_MOST))
_LINES_DOWN = Statement(_LINES.order_by(LogChunk.first.desc()).limit(_MOST))
_NO_LINE = 2**31 - 1
"""Beyond every line."""


@dataclass(frozen=True)
class LogPart:
    """The lines of a chunk that have a number above `after` and below `before`, as they are stored:
    to make values of them takes longer than all else that is done with them."""

    first: int
    last: int
    stored: str
    after: int
    before: int | None

    def lines(self) -> list[tuple[int, list[Any]]]:
        """(number, line), ascending."""
        numbered = enumerate(json.loads(self.stored), self.first)
        if self.first > self.after and (self.before is None or self.last < self.before):
            return list(numbered)
        end = self.last + 1 if self.before is None else self.before
        return [one for one in numbered if self.after < one[0] < end]


@dataclass(frozen=True)
class DigestMismatch:
    """A step computed twice with different bits: P2 is broken, and this says where."""

    step: int
    stored: str
    seen: str


def own_of(stored: Sequence[Any]) -> dict[str, Any]:
    """Of a stored row, which may be older than the column."""
    own = stored[_OWN] if len(stored) > _OWN else None
    return own if isinstance(own, dict) else {}


def window(step: int) -> int:
    return (step - 1) // WINDOW


async def store_rows(session: AsyncSession, job_id: str, rows: Iterable[StepRow]) -> None:
    chunks: dict[tuple[int, int], dict[str, list[Any]]] = defaultdict(dict)
    for row in rows:
        values = [getattr(row, column) for column in COLUMNS]
        chunks[window(row.step), row.attempt][str(row.step)] = values
    for (place, attempt), steps in chunks.items():
        stored = await _STORED.value(session, job=job_id, window=place, attempt=attempt)
        all_steps = {**(stored or {}), **steps}
        told = outline(COLUMNS, all_steps)
        await _PUT_ROWS.row(
            session,
            job_id=job_id,
            window=place,
            attempt=attempt,
            rows=all_steps,
            outline=None if told is None else told.data(),
        )


async def store_digests(
    session: AsyncSession, job_id: str, digests: Mapping[int, str]
) -> tuple[int, list[DigestMismatch]]:
    """How many steps' digests were new or different, and the different ones."""
    news = 0
    mismatches: list[DigestMismatch] = []
    windows: dict[int, dict[str, str]] = defaultdict(dict)
    for step, digest in digests.items():
        windows[window(step)][str(step)] = digest
    for place, steps in sorted(windows.items()):
        known: dict[str, str] = await _DIGESTS.value(session, job=job_id, window=place) or {}
        changed = {step: digest for step, digest in steps.items() if known.get(step) != digest}
        news += len(changed)
        mismatches += [
            DigestMismatch(step=int(step), stored=known[step], seen=digest)
            for step, digest in changed.items()
            if step in known
        ]
        if changed:
            stored = {**known, **changed}
            await _PUT_DIGESTS.row(session, job_id=job_id, window=place, digests=stored)
    return news, sorted(mismatches, key=lambda found: found.step)


async def forget_digests(session: AsyncSession, job_id: str, after: int) -> None:
    """Those of the steps after `after`: they were taken back, and will be computed otherwise."""
    for chunk in await _DIGESTS_FROM.all(session, job=job_id, window=window(after + 1)):
        kept = {step: hex for step, hex in chunk.digests.items() if int(step) <= after}
        await _PUT_DIGESTS.row(session, job_id=job_id, window=chunk.window, digests=kept)


async def store_logs(session: AsyncSession, job: Job, lines: Iterable[LogLine]) -> int:
    """Append the lines that are beyond the job's log cursors; returns how many they were."""
    cursors: dict[str, int] = dict(job.cursor_logs)
    fresh: list[list[Any]] = []
    for line in lines:
        source = f"{line.agent}.{line.incarnation}"
        if line.seq <= cursors.get(source, 0):
            continue
        cursors[source] = line.seq
        said = text(line.text[:LONGEST_LINE])
        fresh.append([line.at, line.rank, line.attempt, line.agent, line.worker, line.stream, said])
    if not fresh:
        return 0
    job.cursor_logs = cursors
    last = await _LAST_LINES.first(session, job=job.id) if job.log_lines else None
    room = _room(last.lines) if last is not None else 0
    parts = [(last.first, [*last.lines, *fresh[:room]])] if last is not None and room else []
    for start in range(room, len(fresh), LINES_PER_CHUNK):
        parts.append((job.log_lines + start + 1, fresh[start : start + LINES_PER_CHUNK]))
    for first, part in parts:
        end = first + len(part) - 1
        await _PUT_LINES.row(session, job_id=job.id, first=first, last=end, lines=part)
    job.log_lines += len(fresh)
    return len(fresh)


async def read_rows(
    session: AsyncSession, job_id: str, after_step: int
) -> AsyncGenerator[tuple[int, int, list[Any]], None]:
    """(step, attempt, values) of the committed history, ascending, beyond `after_step`."""
    place, attempt = window(after_step + 1), -1
    merged: dict[int, tuple[int, list[Any]]] = {}
    more = True
    while more:
        chunks = await _ROWS.all(
            session, job=job_id, window=place, attempt=attempt, most=_CHUNKS_READ
        )
        more = len(chunks) == _CHUNKS_READ
        for chunk in chunks:
            if chunk.window != place:
                for step in sorted(merged):
                    yield step, *merged[step]
                merged = {}
            place, attempt = chunk.window, chunk.attempt
            for step_text, values in chunk.rows.items():
                if int(step_text) > after_step:
                    merged[int(step_text)] = (attempt, values)
    for step in sorted(merged):
        yield step, *merged[step]


async def made_at(session: AsyncSession, job_id: str, step: int, attempt: int) -> float | None:
    """When that attempt ended this step, Unix seconds; None: no such row is stored."""
    chunk = await session.get(MetricChunk, (job_id, window(step), attempt))
    values = chunk.rows.get(str(step)) if chunk is not None else None
    return number(values[COLUMNS.index("at")]) if values else None


async def rows_beyond(
    session: AsyncSession,
    job_id: str,
    attempt: int,
    step: int,
    upto: tuple[int, int],
    limit: int,
) -> list[tuple[int, int, list[Any]]]:
    """(step, attempt, values) in the order in which they were made, beyond a step of an attempt and
    up to (attempt, step): also of what a rollback has taken back since."""
    chunks = await session.stream_scalars(
        select(MetricChunk)
        .where(
            MetricChunk.job_id == job_id,
            or_(
                and_(MetricChunk.attempt == attempt, MetricChunk.window >= window(step + 1)),
                MetricChunk.attempt > attempt,
            ),
            MetricChunk.attempt <= upto[0],
        )
        .order_by(MetricChunk.attempt, MetricChunk.window)
        .execution_options(yield_per=_CHUNKS_READ)
    )
    found: list[tuple[int, int, list[Any]]] = []
    async for chunk in chunks:
        rows = sorted((int(made), values) for made, values in chunk.rows.items())
        found += [
            (made, chunk.attempt, values)
            for made, values in rows
            if (attempt, step) < (chunk.attempt, made) <= upto
        ]
        if len(found) >= limit:
            await chunks.close()
            break
    return found[:limit]


async def read_outlined(
    session: AsyncSession, job_id: str, after_step: int, until_step: int
) -> list[tuple[int, int, list[Any]]]:
    """As `read_rows`, but of each chunk only what its outline holds, where that is enough."""
    chunks = await session.execute(
        select(MetricChunk.window, MetricChunk.attempt, MetricChunk.outline)
        .where(
            MetricChunk.job_id == job_id,
            MetricChunk.window >= window(after_step + 1),
            MetricChunk.window <= window(until_step),
        )
        .order_by(MetricChunk.window, MetricChunk.attempt)
    )
    by_window: dict[int, list[tuple[int, Any]]] = defaultdict(list)
    for place, attempt, told in chunks:
        by_window[place].append((attempt, told))
    edges = {window(after_step + 1), window(until_step)}
    found: dict[int, tuple[int, list[Any]]] = {}
    for place, told_of in by_window.items():
        if len(told_of) == 1 and told_of[0][1] is not None and place not in edges:
            attempt, told = told_of[0]
            rows = told["rows"]
            found.update({int(step): (attempt, values) for step, values in rows.items()})
            continue
        for attempt, _ in told_of:
            chunk = await session.get_one(MetricChunk, (job_id, place, attempt))
            found.update({int(s): (attempt, v) for s, v in chunk.rows.items()})
    return [(step, *found[step]) for step in sorted(found) if after_step < step <= until_step]


async def read_discarded(
    session: AsyncSession, job_id: str, after_step: int, history: History
) -> dict[int, list[tuple[int, int, list[Any]]]]:
    """Attempt -> (step, attempt, values), ascending, of what is not part of history."""
    chunks = await session.execute(
        select(MetricChunk.window, MetricChunk.attempt, MetricChunk.outline["last"].as_integer())
        .where(MetricChunk.job_id == job_id, MetricChunk.window >= window(after_step + 1))
        .order_by(MetricChunk.attempt, MetricChunk.window)
    )
    cut = [
        (place, attempt)
        for place, attempt, last in chunks
        if not history.keeps(attempt, (place + 1) * WINDOW if last is None else last)
    ]
    found: dict[int, list[tuple[int, int, list[Any]]]] = defaultdict(list)
    for place, attempt in cut:
        chunk = await session.get_one(MetricChunk, (job_id, place, attempt))
        found[attempt] += sorted(
            (int(step), attempt, values)
            for step, values in chunk.rows.items()
            if int(step) > after_step and not history.keeps(attempt, int(step))
        )
    return {attempt: rows for attempt, rows in found.items() if rows}


async def read_digests(
    session: AsyncSession, job_id: str, after_step: int
) -> AsyncGenerator[tuple[int, str], None]:
    """(step, digest), ascending, beyond `after_step`."""
    chunks = await session.stream_scalars(
        select(DigestChunk)
        .where(DigestChunk.job_id == job_id, DigestChunk.window >= window(after_step + 1))
        .order_by(DigestChunk.window)
    )
    async for chunk in chunks:
        for step, digest in sorted((int(step), hexed) for step, hexed in chunk.digests.items()):
            if step > after_step:
                yield step, digest


async def read_log_chunks(
    session: AsyncSession,
    job_id: str,
    after: int,
    *,
    before: int | None = None,
    backwards: bool = False,
) -> AsyncGenerator[LogPart, None]:
    """The lines beyond `after` and below `before`, in parts, none of them empty; from the oldest
    on, or from the newest down."""
    start = await _START.value(session, job=job_id, line=after + 1)
    low, high = start or 0, _NO_LINE if before is None else before
    wanted = _LINES_DOWN if backwards else _LINES_UP
    together = _LAST_CHUNKS_READ if backwards else _CHUNKS_READ
    more = True
    while more:
        chunks = await wanted.all(
            session, job=job_id, low=low, high=high, after=after, most=together
        )
        more = len(chunks) == together
        for first, last, stored in chunks:
            yield LogPart(first, last, stored, after, before)
            low, high = (low, first) if backwards else (first + 1, high)


async def line_before(session: AsyncSession, job_id: str, since: float) -> int:
    """The number of a line before which nothing was written at `since` or later. Lines of several
    nodes arrive together, not quite in the order of their times: hence a margin."""
    edge = since - _CLOCKS_DIFFER_S
    low, high = (
        0,
        await session.scalar(select(func.max(LogChunk.first)).where(LogChunk.job_id == job_id)),
    )
    if high is None:
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        chunk = (
            await session.execute(
                select(LogChunk.first, LogChunk.lines)
                .where(LogChunk.job_id == job_id, LogChunk.first <= middle)
                .order_by(LogChunk.first.desc())
                .limit(1)
            )
        ).first()
        if chunk is None:
            low = middle
        elif chunk.lines and max(line[0] for line in chunk.lines) >= edge:
            high = chunk.first - 1
        else:
            low = middle
    start = await session.scalar(
        select(func.max(LogChunk.first)).where(LogChunk.job_id == job_id, LogChunk.first <= low)
    )
    return max(0, (start or 1) - 1)


def ends_before(newest: float, since: float) -> bool:
    """Whether nothing in or before a chunk was written at `since` or later, as far as one can tell
    from it: by its newest line, for others may have come late."""
    return newest < since - _CLOCKS_DIFFER_S


def _room(lines: Sequence[Sequence[Any]]) -> int:
    """Lines that may still be appended to the newest chunk, which has these."""
    if sum(len(line[-1]) for line in lines) >= CHARACTERS_PER_CHUNK:
        return 0
    return max(0, LINES_PER_CHUNK - len(lines))
