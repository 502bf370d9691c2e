"""What single ranks took, over time, in a bounded space: never a row per step or per rank.

Time is cut into buckets; a chunk holds BUCKETS of them, with the mean of each rank's compute time.
A job begins with buckets of a second; once it has more than MOST_CHUNKS chunks, its buckets become
twice as wide. So a job of any length has at most MOST_CHUNKS * BUCKETS buckets, of two bytes a
rank: 4 MB for 1,024 ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from sqlalchemy import bindparam, delete, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_service.store.json_safe import text
from holdfast_service.store.models import RankChunk, RankStates
from holdfast_service.store.statement import JOB, Put, Statement
from holdfast_workers.protocol.messages import Beat, StepRow

BUCKETS = 64
MOST_CHUNKS = 32
MOST_RANKS = 16_384

Values = npt.NDArray[np.float32]

_PUT_CHUNK, _PUT_STATES = Put(RankChunk), Put(RankStates)
_CHUNK = Statement(
    select(RankChunk).where(RankChunk.job_id == JOB, RankChunk.place == bindparam("place"))
)
_CHUNKS = Statement(select(RankChunk).where(RankChunk.job_id == JOB))
STATES = Statement(select(RankStates).where(RankStates.job_id == JOB))
_EXTENT = Statement(
    select(func.max(RankChunk.width_s), func.min(RankChunk.place), func.max(RankChunk.place)).where(
        RankChunk.job_id == JOB
    )
)
_BETWEEN = Statement(
    select(RankChunk)
    .where(
        RankChunk.job_id == JOB,
        RankChunk.place >= bindparam("first"),
        RankChunk.place <= bindparam("last"),
    )
    .order_by(RankChunk.place)
)


@dataclass(frozen=True)
class Stretch:
    """Buckets in a row, from `since` (Unix seconds), each `width_s` long."""

    since: int
    width_s: int
    steps: Values
    """By bucket: mean seconds of a step; NaN: there was none."""
    compute: Values
    """By bucket and rank: the same of what each rank computed."""


class _Buckets:
    """A chunk, unpacked."""

    def __init__(self, ranks: int) -> None:
        self.counts = np.zeros(BUCKETS, np.int64)
        self.steps = np.full(BUCKETS, np.nan, np.float32)
        self.compute = np.full((BUCKETS, ranks), np.nan, np.float32)

    @classmethod
    def of(cls, chunk: Any) -> _Buckets:
        """`chunk`: a RankChunk, or a row with its columns."""
        found = cls(chunk.ranks)
        found.counts = np.asarray(chunk.counts, np.int64)
        found.steps = np.frombuffer(chunk.steps, "<f2").astype(np.float32)
        compute = np.frombuffer(chunk.compute, "<f2").astype(np.float32)
        found.compute = compute.reshape(BUCKETS, chunk.ranks)
        return found

    def widen(self, ranks: int) -> None:
        more = ranks - self.compute.shape[1]
        if more > 0:
            self.compute = np.pad(self.compute, ((0, 0), (0, more)), constant_values=np.nan)

    def add(self, bucket: int, count: int, step_s: float, compute: Values) -> None:
        """Means of `count` steps more."""
        before = int(self.counts[bucket])
        self.widen(len(compute))
        if not before:  # as nearly always
            self.counts[bucket], self.steps[bucket] = count, step_s
            self.compute[bucket, : len(compute)] = compute
            return
        weight = count / (before + count)
        self.steps[bucket] = _mixed(self.steps[bucket], np.float32(step_s), weight)
        mine = self.compute[bucket, : len(compute)]
        self.compute[bucket, : len(compute)] = _mixed(mine, compute, weight)
        self.counts[bucket] = before + count

    def packed(self) -> dict[str, Any]:
        """The columns of a chunk that hold it."""
        return {
            "ranks": self.compute.shape[1],
            "counts": self.counts.tolist(),
            "steps": self.steps.astype("<f2").tobytes(),
            "compute": self.compute.astype("<f2").tobytes(),
        }


async def store_rows(session: AsyncSession, job_id: str, rows: Iterable[StepRow]) -> None:
    """Rows that were not stored before."""
    told = [row for row in rows if 0 < len(row.compute_s) <= MOST_RANKS and row.at > 0]
    if not told:
        return
    width, first, _ = await _extent(session, job_id)
    newest = max(int(row.at) for row in told)
    while first is not None and newest // (width * BUCKETS) - first >= MOST_CHUNKS:
        await _double(session, job_id, width)
        width, first = 2 * width, first // 2
    oldest = newest // (width * BUCKETS) - MOST_CHUNKS + 1
    places: dict[int, dict[int, list[StepRow]]] = defaultdict(lambda: defaultdict(list))
    for row in told:
        bucket = int(row.at) // width
        places[max(bucket // BUCKETS, oldest)][bucket % BUCKETS].append(row)
    for place, buckets in sorted(places.items()):
        await _add(session, job_id, place, width, buckets)


async def read(session: AsyncSession, job_id: str, since: float, until: float) -> Stretch | None:
    """All buckets that lie between, as far as they go; None: there is none."""
    width, _, _ = await _extent(session, job_id)
    span = width * BUCKETS
    found = await _BETWEEN.all(
        session,
        job=job_id,
        first=int(max(0.0, since)) // span,
        last=int(max(0.0, until)) // span,
    )
    chunks = {chunk.place: _Buckets.of(chunk) for chunk in found}
    if not chunks:
        return None
    first, last = min(chunks), max(chunks)
    ranks = max(chunk.compute.shape[1] for chunk in chunks.values())
    none = _Buckets(ranks)
    parts = [chunks.get(place, none) for place in range(first, last + 1)]
    for part in parts:
        part.widen(ranks)
    return Stretch(
        since=first * span,
        width_s=width,
        steps=np.concatenate([part.steps for part in parts]),
        compute=np.concatenate([part.compute for part in parts]),
    )


async def extent(session: AsyncSession, job_id: str) -> tuple[float, float] | None:
    """From when to when there are buckets."""
    width, first, last = await _extent(session, job_id)
    if first is None or last is None:
        return None
    return float(first * width * BUCKETS), float((last + 1) * width * BUCKETS)


async def store_states(
    session: AsyncSession,
    job_id: str,
    at: float,
    attempt: int,
    beats: Sequence[Beat],
    compute_s: Mapping[int, float],
) -> None:
    """The ranks as they were seen at `at`; of those without new steps the compute time stays."""
    states = await STATES.first(session, job=job_id)
    before = states.seen if states is not None and states.attempt == attempt else {}
    seen: dict[str, list[Any]] = {}
    for beat in beats:
        if beat.attempt != attempt:
            continue
        known = before.get(str(beat.rank))
        took = compute_s.get(beat.rank, known[3] if known else None)
        seen[str(beat.rank)] = [beat.step, text(beat.phase)[:16], round(beat.age_s, 3), took]
    await _PUT_STATES.row(session, job_id=job_id, at=at, attempt=attempt, seen=seen)


def means(rows: Sequence[StepRow]) -> dict[int, float]:
    """Rank -> its mean compute time in the newest attempt of these rows."""
    newest = max((row.attempt for row in rows), default=0)
    told = [row.compute_s for row in rows if row.attempt == newest and row.compute_s]
    if not told or len({len(one) for one in told}) != 1:
        return {}
    mean = np.asarray(told, np.float64).mean(axis=0)
    return {rank: round(float(seconds), 6) for rank, seconds in enumerate(mean)}


async def _add(
    session: AsyncSession,
    job_id: str,
    place: int,
    width: int,
    buckets: Mapping[int, Sequence[StepRow]],
) -> None:
    chunk = await _CHUNK.first(session, job=job_id, place=place)
    unpacked = _Buckets(0) if chunk is None else _Buckets.of(chunk)
    for bucket, rows in buckets.items():
        if len(rows) == 1:
            unpacked.add(bucket, 1, rows[0].step_time_s, np.asarray(rows[0].compute_s, np.float32))
            continue
        widest = max(len(row.compute_s) for row in rows)
        same = [row for row in rows if len(row.compute_s) == widest]
        compute = np.asarray([row.compute_s for row in same], np.float32).mean(axis=0)
        step_s = float(np.mean([row.step_time_s for row in same]))
        unpacked.add(bucket, len(same), step_s, compute)
    await _PUT_CHUNK.row(session, job_id=job_id, place=place, width_s=width, **unpacked.packed())


async def _double(session: AsyncSession, job_id: str, width: int) -> None:
    """Make all buckets of a job twice as wide."""
    chunks = await _CHUNKS.all(session, job=job_id)
    old = {chunk.place: (chunk.ranks, _Buckets.of(chunk)) for chunk in chunks}
    await session.execute(delete(RankChunk).where(RankChunk.job_id == job_id))
    for place in sorted({one // 2 for one in old}):
        merged = _Buckets(max(old[one][0] for one in (2 * place, 2 * place + 1) if one in old))
        for half in (0, 1):
            part = old.get(2 * place + half)
            if part is None:
                continue
            _merge_pairs(part[1], merged, half * BUCKETS // 2)
        columns = {"job_id": job_id, "place": place, "width_s": 2 * width, **merged.packed()}
        await _PUT_CHUNK.row(session, **columns)


def _merge_pairs(part: _Buckets, into: _Buckets, at: int) -> None:
    for bucket in range(0, BUCKETS, 2):
        for one in (bucket, bucket + 1):
            if part.counts[one]:
                into.add(
                    at + bucket // 2,
                    int(part.counts[one]),
                    float(part.steps[one]),
                    part.compute[one],
                )


def _mixed(before: Any, more: Any, weight: float) -> Any:
    """A mean, with `weight` of what is new; NaN on either side counts for nothing."""
    mixed = before + weight * (more - before)
    return np.where(np.isnan(before), more, np.where(np.isnan(more), before, mixed))


async def _extent(session: AsyncSession, job_id: str) -> tuple[int, int | None, int | None]:
    """Width of the buckets, first and last place."""
    width, first, last = (await _EXTENT.all(session, job=job_id))[0]
    return width or 1, first, last
