"""Metrics, digests and log lines: in chunks, idempotent, with the committed history on top.

A step belongs to the window `(step - 1) // WINDOW`; a chunk holds the rows of one attempt in one
window. When attempts overlap, because a recovery computed steps again, the later one's row is
the history. Storing what is stored already changes nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_service.store.models import DigestChunk, Job, LogChunk, MetricChunk
from holdfast_service.store.storable import text
from holdfast_workers.messages import LogLine, StepRow

WINDOW = 128
LINES_PER_CHUNK = 500
CHARACTERS_PER_CHUNK = 64 * 1024
LONGEST_LINE = 16 * 1024
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
)
"""What is kept of a StepRow beside its step and attempt, in this order. Append only."""


@dataclass(frozen=True)
class DigestMismatch:
    """A step computed twice with different bits: P2 is broken, and this says where."""

    step: int
    stored: str
    seen: str


def window(step: int) -> int:
    return (step - 1) // WINDOW


async def store_rows(session: AsyncSession, job_id: str, rows: Iterable[StepRow]) -> None:
    chunks: dict[tuple[int, int], dict[str, list[Any]]] = defaultdict(dict)
    for row in rows:
        values = [getattr(row, column) for column in COLUMNS]
        chunks[window(row.step), row.attempt][str(row.step)] = values
    for (place, attempt), steps in chunks.items():
        chunk = await session.get(MetricChunk, (job_id, place, attempt))
        if chunk is None:
            session.add(MetricChunk(job_id=job_id, window=place, attempt=attempt, rows=steps))
        else:
            chunk.rows = {**chunk.rows, **steps}


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
        chunk = await session.get(DigestChunk, (job_id, place))
        known: dict[str, str] = dict(chunk.digests) if chunk else {}
        changed = {step: digest for step, digest in steps.items() if known.get(step) != digest}
        news += len(changed)
        mismatches += [
            DigestMismatch(step=int(step), stored=known[step], seen=digest)
            for step, digest in changed.items()
            if step in known
        ]
        if chunk is None:
            session.add(DigestChunk(job_id=job_id, window=place, digests=steps))
        elif changed:
            chunk.digests = {**known, **changed}
    return news, sorted(mismatches, key=lambda found: found.step)


async def forget_digests(session: AsyncSession, job_id: str, after: int) -> None:
    """Those of the steps after `after`: they were taken back, and will be computed otherwise."""
    chunks = select(DigestChunk).where(
        DigestChunk.job_id == job_id, DigestChunk.window >= window(after + 1)
    )
    for chunk in await session.scalars(chunks):
        chunk.digests = {step: hex for step, hex in chunk.digests.items() if int(step) <= after}


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
    last = await session.scalar(
        select(LogChunk).where(LogChunk.job_id == job.id).order_by(LogChunk.first.desc()).limit(1)
    )
    room = _room(last)
    if last is not None and room:
        last.lines = [*last.lines, *fresh[:room]]
        last.last += len(fresh[:room])
    for start in range(room, len(fresh), LINES_PER_CHUNK):
        part = fresh[start : start + LINES_PER_CHUNK]
        first = job.log_lines + start + 1
        session.add(LogChunk(job_id=job.id, first=first, last=first + len(part) - 1, lines=part))
    job.log_lines += len(fresh)
    return len(fresh)


async def read_rows(
    session: AsyncSession, job_id: str, after_step: int
) -> AsyncGenerator[tuple[int, int, list[Any]], None]:
    """(step, attempt, values) of the committed history, ascending, beyond `after_step`."""
    start = window(after_step + 1)
    chunks = await session.stream_scalars(
        select(MetricChunk)
        .where(MetricChunk.job_id == job_id, MetricChunk.window >= start)
        .order_by(MetricChunk.window, MetricChunk.attempt)
    )
    place = -1
    merged: dict[int, tuple[int, list[Any]]] = {}
    async for chunk in chunks:
        if chunk.window != place:
            for step in sorted(merged):
                yield step, *merged[step]
            place, merged = chunk.window, {}
        for step_text, values in chunk.rows.items():
            if int(step_text) > after_step:
                merged[int(step_text)] = (chunk.attempt, values)
    for step in sorted(merged):
        yield step, *merged[step]


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


async def read_logs(
    session: AsyncSession, job_id: str, after: int, *, backwards: bool = False
) -> AsyncGenerator[tuple[int, list[Any]], None]:
    """(number, line) beyond line `after`; `backwards`: from the newest down to it."""
    order = LogChunk.first.desc() if backwards else LogChunk.first
    chunks = await session.stream_scalars(
        select(LogChunk).where(LogChunk.job_id == job_id, LogChunk.last > after).order_by(order)
    )
    async for chunk in chunks:
        numbered = [(chunk.first + index, line) for index, line in enumerate(chunk.lines)]
        for number, line in reversed(numbered) if backwards else numbered:
            if number > after:
                yield number, line


def _room(chunk: LogChunk | None) -> int:
    """Lines that may still be appended to the newest chunk."""
    if chunk is None or sum(len(line[-1]) for line in chunk.lines) >= CHARACTERS_PER_CHUNK:
        return 0
    return max(0, LINES_PER_CHUNK - len(chunk.lines))
