"""Stores and reads metrics, digests and log lines in chunks. Writes are idempotent.

A step belongs to the window `(step - 1) // WINDOW`; a chunk holds the rows of one attempt in one
window. When attempts overlap, because a recovery computed steps again, the row of the later attempt
is the committed history. Storing rows that are already stored changes nothing.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Integer, Text, and_, bindparam, cast, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_service.job_model.events.checkpoints import DigestMismatchEvent
from holdfast_service.job_model.goodput import History
from holdfast_service.store.downsampling import OWN, outline
from holdfast_service.store.json_safe import number, text
from holdfast_service.store.models import DigestChunk, JobRecord, LogChunk, MetricChunk
from holdfast_service.store.statement import JOB, Statement, Upsert
from holdfast_workers.protocol.messages import LogLine, StepRow
from holdfast_workers.protocol.metrics import METRICS

WINDOW = 128
MAX_CHUNK_LINES = 500
MAX_CHUNK_CHARACTERS = 64 * 1024
MAX_LINE_LENGTH = 16 * 1024
_CHUNKS_READ = 8
"""Number of chunks per query."""
_LAST_CHUNKS_READ = 2
"""The same when reading from the newest down: a client that asks for the last lines wants few."""
_CLOCK_SKEW_S = 60.0
COLUMNS = ("at", OWN, *(name for name, metric in METRICS.items() if not metric.derived_from))
"""The stored attributes of a StepRow besides step and attempt, in this order."""
_OWN = COLUMNS.index(OWN)
_PUT_ROWS, _PUT_DIGESTS, _PUT_LINES = Upsert(MetricChunk), Upsert(DigestChunk), Upsert(LogChunk)
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
_NEWEST_DIGESTS = Statement(
    select(DigestChunk.digests)
    .where(
        DigestChunk.job_id == JOB,
        DigestChunk.window >= 0,
        cast(DigestChunk.digests, Text) != "{}",  # a rollback may leave a chunk empty
    )
    .order_by(DigestChunk.window.desc())
    .limit(1)
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
"""A number above every line number."""


@dataclass(frozen=True)
class LogSlice:
    """The lines of a chunk with numbers above `after` and below `before`, as stored JSON: parsing
    costs more than everything else that a reader does with them."""

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
        return [line for line in numbered if self.after < line[0] < end]


def own_metrics(stored: Sequence[Any]) -> dict[str, Any]:
    """The metrics reported by the user's function in a stored row."""
    own: dict[str, Any] = stored[_OWN]
    return own


def window(step: int) -> int:
    return (step - 1) // WINDOW


async def store_rows(session: AsyncSession, job_id: str, rows: Iterable[StepRow]) -> None:
    chunks: dict[tuple[int, int], dict[str, list[Any]]] = defaultdict(dict)
    for row in rows:
        values = [getattr(row, column) for column in COLUMNS]
        chunks[window(row.step), row.attempt][str(row.step)] = values
    for (index, attempt), steps in chunks.items():
        stored = await _STORED.value(session, job=job_id, window=index, attempt=attempt)
        all_steps = {**(stored or {}), **steps}
        summary = outline(COLUMNS, all_steps)
        await _PUT_ROWS.row(
            session,
            job_id=job_id,
            window=index,
            attempt=attempt,
            rows=all_steps,
            outline=None if summary is None else summary.data(),
        )


async def store_digests(
    session: AsyncSession, job_id: str, attempt: int, digests: Mapping[int, str]
) -> tuple[int, list[DigestMismatchEvent]]:
    """Store the digests that `attempt` has reported. Returns the number of new or different ones,
    and the mismatches: steps that were computed twice with different bits, against promise P2."""
    changed_count = 0
    mismatches: list[DigestMismatchEvent] = []
    windows: dict[int, dict[str, str]] = defaultdict(dict)
    for step, digest in digests.items():
        windows[window(step)][str(step)] = digest
    for index, steps in sorted(windows.items()):
        known: dict[str, str] = await _DIGESTS.value(session, job=job_id, window=index) or {}
        changed = {step: digest for step, digest in steps.items() if known.get(step) != digest}
        changed_count += len(changed)
        mismatches += [
            DigestMismatchEvent(step=int(step), stored=known[step], seen=digest, attempt=attempt)
            for step, digest in changed.items()
            if step in known
        ]
        if changed:
            stored = {**known, **changed}
            await _PUT_DIGESTS.row(session, job_id=job_id, window=index, digests=stored)
    return changed_count, sorted(mismatches, key=lambda mismatch: mismatch.step)


async def forget_digests(session: AsyncSession, job_id: str, after: int) -> None:
    """Delete the digests of steps above `after`: these steps were rolled back, and will be computed
    with different data."""
    for chunk in await _DIGESTS_FROM.all(session, job=job_id, window=window(after + 1)):
        kept = {step: digest for step, digest in chunk.digests.items() if int(step) <= after}
        await _PUT_DIGESTS.row(session, job_id=job_id, window=chunk.window, digests=kept)


async def store_logs(session: AsyncSession, job: JobRecord, lines: Iterable[LogLine]) -> int:
    """Append the lines above the job's log cursors; returns the number of appended lines."""
    cursors: dict[str, int] = dict(job.cursor_logs)
    fresh: list[list[Any]] = []
    for line in lines:
        source = f"{line.agent}.{line.incarnation}"
        if line.seq <= cursors.get(source, 0):
            continue
        cursors[source] = line.seq
        content = text(_bounded(line.text))
        fresh.append(
            [line.at, line.rank, line.attempt, line.agent, line.worker, line.stream, content]
        )
    if not fresh:
        return 0
    job.cursor_logs = cursors
    last = await _LAST_LINES.first(session, job=job.id) if job.log_lines else None
    room = _free_lines(last.lines) if last is not None else 0
    parts = [(last.first, [*last.lines, *fresh[:room]])] if last is not None and room else []
    for start in range(room, len(fresh), MAX_CHUNK_LINES):
        parts.append((job.log_lines + start + 1, fresh[start : start + MAX_CHUNK_LINES]))
    for first, part in parts:
        end = first + len(part) - 1
        await _PUT_LINES.row(session, job_id=job.id, first=first, last=end, lines=part)
    job.log_lines += len(fresh)
    return len(fresh)


async def read_rows(
    session: AsyncSession, job_id: str, after_step: int
) -> AsyncGenerator[tuple[int, int, list[Any]], None]:
    """(step, attempt, values) of the committed history above `after_step`, ascending."""
    index, attempt = window(after_step + 1), -1
    merged: dict[int, tuple[int, list[Any]]] = {}
    more = True
    while more:
        chunks = await _ROWS.all(
            session, job=job_id, window=index, attempt=attempt, most=_CHUNKS_READ
        )
        more = len(chunks) == _CHUNKS_READ
        for chunk in chunks:
            if chunk.window != index:
                for step in sorted(merged):
                    yield step, *merged[step]
                merged = {}
            index, attempt = chunk.window, chunk.attempt
            for step_text, values in chunk.rows.items():
                if int(step_text) > after_step:
                    merged[int(step_text)] = (attempt, values)
    for step in sorted(merged):
        yield step, *merged[step]


async def row_time(session: AsyncSession, job_id: str, step: int, attempt: int) -> float | None:
    """When the attempt finished this step, in Unix seconds; None if no such row is stored."""
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
    """(step, attempt, values) in the order of computation, after `step` of `attempt` and up to
    `upto` (attempt, step); includes steps that were rolled back since."""
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
        rows = sorted((int(row_step), values) for row_step, values in chunk.rows.items())
        found += [
            (row_step, chunk.attempt, values)
            for row_step, values in rows
            if (attempt, step) < (chunk.attempt, row_step) <= upto
        ]
        if len(found) >= limit:
            await chunks.close()
            break
    return found[:limit]


async def read_outlined(
    session: AsyncSession, job_id: str, after_step: int, until_step: int
) -> list[tuple[int, int, list[Any]]]:
    """Like `read_rows`, but uses the outline of a chunk instead of its rows where possible."""
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
    for index, attempt, outlined in chunks:
        by_window[index].append((attempt, outlined))
    edges = {window(after_step + 1), window(until_step)}
    found: dict[int, tuple[int, list[Any]]] = {}
    for index, outlines in by_window.items():
        if len(outlines) == 1 and outlines[0][1] is not None and index not in edges:
            attempt, outlined = outlines[0]
            rows = outlined["rows"]
            found.update({int(step): (attempt, values) for step, values in rows.items()})
            continue
        for attempt, _ in outlines:
            chunk = await session.get_one(MetricChunk, (job_id, index, attempt))
            found.update({int(s): (attempt, v) for s, v in chunk.rows.items()})
    return [(step, *found[step]) for step in sorted(found) if after_step < step <= until_step]


async def read_discarded(
    session: AsyncSession, job_id: str, after_step: int, history: History
) -> dict[int, list[tuple[int, int, list[Any]]]]:
    """Attempt -> (step, attempt, values), ascending, of the steps that are not part of history."""
    chunks = await session.execute(
        select(MetricChunk.window, MetricChunk.attempt, MetricChunk.outline["last"].as_integer())
        .where(MetricChunk.job_id == job_id, MetricChunk.window >= window(after_step + 1))
        .order_by(MetricChunk.attempt, MetricChunk.window)
    )
    affected = [
        (index, attempt)
        for index, attempt, last in chunks
        if not history.keeps(attempt, (index + 1) * WINDOW if last is None else last)
    ]
    found: dict[int, list[tuple[int, int, list[Any]]]] = defaultdict(list)
    for index, attempt in affected:
        chunk = await session.get_one(MetricChunk, (job_id, index, attempt))
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


async def newest_digest(session: AsyncSession, job_id: str) -> int | None:
    """The newest step with a digest, apart from the initial state."""
    digests = await _NEWEST_DIGESTS.value(session, job=job_id)
    return None if digests is None else max(map(int, digests))


async def read_log_chunks(
    session: AsyncSession,
    job_id: str,
    after: int,
    *,
    before: int | None = None,
    backwards: bool = False,
) -> AsyncGenerator[LogSlice, None]:
    """The lines above `after` and below `before`, in non-empty parts, from the oldest to the newest
    or, with `backwards`, from the newest to the oldest."""
    start = await _START.value(session, job=job_id, line=after + 1)
    low, high = start or 0, _NO_LINE if before is None else before
    statement = _LINES_DOWN if backwards else _LINES_UP
    batch_size = _LAST_CHUNKS_READ if backwards else _CHUNKS_READ
    more = True
    while more:
        chunks = await statement.all(
            session, job=job_id, low=low, high=high, after=after, most=batch_size
        )
        more = len(chunks) == batch_size
        for first, last, stored in chunks:
            yield LogSlice(first, last, stored, after, before)
            low, high = (low, first) if backwards else (first + 1, high)


async def line_before(session: AsyncSession, job_id: str, since: float) -> int:
    """A line number such that all earlier lines were written before `since`. The lines of several
    nodes arrive interleaved and not strictly in time order, hence the margin."""
    edge = since - _CLOCK_SKEW_S
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
    """Whether a chunk and all earlier chunks were written before `since`, as far as its newest line
    shows; lines may arrive late, hence the margin."""
    return newest < since - _CLOCK_SKEW_S


def _bounded(line: str) -> str:
    beyond = len(line) - MAX_LINE_LENGTH
    return line if beyond <= 0 else f"{line[:MAX_LINE_LENGTH]}... ({beyond:,} characters left out)"


def _free_lines(lines: Sequence[Sequence[Any]]) -> int:
    """Number of lines that can still be appended to the newest chunk, which holds `lines`."""
    if sum(len(line[-1]) for line in lines) >= MAX_CHUNK_CHARACTERS:
        return 0
    return max(0, MAX_CHUNK_LINES - len(lines))
