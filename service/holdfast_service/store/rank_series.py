"""Compute times of single ranks over time, in bounded space: never a row per step or per rank.

Time is divided into buckets; a chunk holds `BUCKETS` buckets with the mean compute time of each
rank. A job starts with buckets of one second; once it has more than `MAX_CHUNKS` chunks, the bucket
width doubles. A job of any length therefore has at most `MAX_CHUNKS` * `BUCKETS` buckets of two
bytes per rank: 4 MB for 1,024 ranks.
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
from holdfast_service.store.statement import JOB, Statement, Upsert
from holdfast_workers.protocol.messages import Beat, StepRow

BUCKETS = 64
MAX_CHUNKS = 32
MAX_RANKS = 16_384

Values = npt.NDArray[np.float32]

_PUT_CHUNK, _PUT_STATES = Upsert(RankChunk), Upsert(RankStates)
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
class RankTimes:
    """Consecutive buckets from `since` (Unix seconds), each `width_s` seconds long."""

    since: int
    width_s: int
    steps: Values
    """Mean seconds per step, by bucket; NaN: no step."""
    compute: Values
    """Mean compute seconds per step, by bucket and rank; NaN: no step."""


class _Buckets:
    """The unpacked content of a chunk."""

    def __init__(self, ranks: int) -> None:
        self.counts = np.zeros(BUCKETS, np.int64)
        self.steps = np.full(BUCKETS, np.nan, np.float32)
        self.compute = np.full((BUCKETS, ranks), np.nan, np.float32)

    @classmethod
    def of(cls, chunk: Any) -> _Buckets:
        """Unpack `chunk`: a RankChunk, or a result row with its columns."""
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
        """Merge the means of `count` further steps into `bucket`."""
        before = int(self.counts[bucket])
        self.widen(len(compute))
        if not before:  # the common case
            self.counts[bucket], self.steps[bucket] = count, step_s
            self.compute[bucket, : len(compute)] = compute
            return
        weight = count / (before + count)
        self.steps[bucket] = _weighted_mean(self.steps[bucket], np.float32(step_s), weight)
        known = self.compute[bucket, : len(compute)]
        self.compute[bucket, : len(compute)] = _weighted_mean(known, compute, weight)
        self.counts[bucket] = before + count

    def packed(self) -> dict[str, Any]:
        """The values of the chunk's columns."""
        return {
            "ranks": self.compute.shape[1],
            "counts": self.counts.tolist(),
            "steps": self.steps.astype("<f2").tobytes(),
            "compute": self.compute.astype("<f2").tobytes(),
        }


async def store_rows(session: AsyncSession, job_id: str, rows: Iterable[StepRow]) -> None:
    """Add rows that were not stored before."""
    valid = [row for row in rows if 0 < len(row.compute_s) <= MAX_RANKS and row.at > 0]
    if not valid:
        return
    width, first, _ = await _extent(session, job_id)
    newest = max(int(row.at) for row in valid)
    while first is not None and newest // (width * BUCKETS) - first >= MAX_CHUNKS:
        await _double_bucket_width(session, job_id, width)
        width, first = 2 * width, first // 2
    oldest = newest // (width * BUCKETS) - MAX_CHUNKS + 1
    places: dict[int, dict[int, list[StepRow]]] = defaultdict(lambda: defaultdict(list))
    for row in valid:
        bucket = int(row.at) // width
        places[max(bucket // BUCKETS, oldest)][bucket % BUCKETS].append(row)
    for place, buckets in sorted(places.items()):
        await _add(session, job_id, place, width, buckets)


async def read(session: AsyncSession, job_id: str, since: float, until: float) -> RankTimes | None:
    """All stored buckets between `since` and `until`; None if there are none."""
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
    empty = _Buckets(ranks)
    parts = [chunks.get(place, empty) for place in range(first, last + 1)]
    for part in parts:
        part.widen(ranks)
    return RankTimes(
        since=first * span,
        width_s=width,
        steps=np.concatenate([part.steps for part in parts]),
        compute=np.concatenate([part.compute for part in parts]),
    )


async def extent(session: AsyncSession, job_id: str) -> tuple[float, float] | None:
    """The time range that the stored buckets cover; None if there are none."""
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
    rows: Sequence[StepRow],
) -> None:
    """Store the rank states observed at `at`. Ranks without new steps, which are in `rows`, keep
    their compute time."""
    compute_s = _mean_compute_s(rows)
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


def _mean_compute_s(rows: Sequence[StepRow]) -> dict[int, float]:
    """Rank -> mean compute time in the newest attempt of these rows."""
    newest = max((row.attempt for row in rows), default=0)
    samples = [row.compute_s for row in rows if row.attempt == newest and row.compute_s]
    if not samples or len({len(sample) for sample in samples}) != 1:
        return {}
    mean = np.asarray(samples, np.float64).mean(axis=0)
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


async def _double_bucket_width(session: AsyncSession, job_id: str, width: int) -> None:
    """Double the width of all buckets of a job."""
    chunks = await _CHUNKS.all(session, job=job_id)
    old = {chunk.place: (chunk.ranks, _Buckets.of(chunk)) for chunk in chunks}
    await session.execute(delete(RankChunk).where(RankChunk.job_id == job_id))
    for place in sorted({old_place // 2 for old_place in old}):
        halves = (2 * place, 2 * place + 1)
        merged = _Buckets(max(old[half][0] for half in halves if half in old))
        for half in (0, 1):
            part = old.get(2 * place + half)
            if part is None:
                continue
            _merge_pairs(part[1], merged, half * BUCKETS // 2)
        columns = {"job_id": job_id, "place": place, "width_s": 2 * width, **merged.packed()}
        await _PUT_CHUNK.row(session, **columns)


def _merge_pairs(part: _Buckets, into: _Buckets, at: int) -> None:
    for bucket in range(0, BUCKETS, 2):
        for source in (bucket, bucket + 1):
            if part.counts[source]:
                into.add(
                    at + bucket // 2,
                    int(part.counts[source]),
                    float(part.steps[source]),
                    part.compute[source],
                )


def _weighted_mean(before: Any, more: Any, weight: float) -> Any:
    """The mean of both with `weight` on `more`; a NaN on either side is ignored."""
    mixed = before + weight * (more - before)
    return np.where(np.isnan(before), more, np.where(np.isnan(more), before, mixed))


async def _extent(session: AsyncSession, job_id: str) -> tuple[int, int | None, int | None]:
    """Width of the buckets in seconds, and the first and last chunk place."""
    width, first, last = (await _EXTENT.all(session, job=job_id))[0]
    return width or 1, first, last
