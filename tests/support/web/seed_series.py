"""The series of a seeded job: metric rows, times of the ranks, log lines."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
from tests.support.web.seed_story import PER_NODE, SLOW_RANK, STEP_S, Leg, Size

from holdfast_service.store import rank_series, series
from holdfast_service.store.engine import Store
from holdfast_service.store.transaction import job_transaction
from holdfast_workers.protocol.messages import LogLine, StepRow


def row(attempt: int, step: int, at: float) -> StepRow:
    """Realistic curves: a power law with noise, and a spike where the guard tripped."""
    noise = random.Random(step * 31 + attempt)
    loss = 1.95 + 8.6 / (1 + step / 160) ** 0.52 + noise.gauss(0, 0.018)
    grad_norm = 0.42 + 2.4 / (1 + step / 300) ** 0.6 + abs(noise.gauss(0, 0.05))
    spike = step - int(100_000 * 0.4665)
    if attempt == 3 and 0 < spike < 400:
        loss += 9.0 * (spike / 350) ** 2
        grad_norm += 7.0 * (spike / 350) ** 1.5
    warm = min(1.0, step / 2000)
    return StepRow(
        attempt=attempt,
        step=step,
        at=at,
        loss=loss,
        grad_norm=grad_norm,
        lr=3e-4 * warm * 0.5 * (1 + math.cos(math.pi * step / 160_000)),
        tokens=4_194_304,
        step_time_s=STEP_S * (0.93 + abs(noise.gauss(0, 0.012))),
        loader_wait_s=abs(noise.gauss(0.002, 0.001)),
        samples=f"s{step}",
        protected_step=step - 1,
        checkpoint_wait_s=abs(noise.gauss(0, 0.0012)) + (0.03 if step % 500 == 0 else 0.0),
    )


def rows(leg: Leg) -> Iterator[StepRow]:
    for step in range(leg.first, leg.last + 1):
        yield row(leg.attempt, step, leg.since + (step - leg.first) * STEP_S)


async def store_rank_times(store: Store, job: str, legs: list[Leg], size: Size) -> None:
    """The compute times of the ranks, every 16 s of the run, more often in a short run."""
    rng = np.random.default_rng(11)
    base = 0.158 * (1 + rng.normal(0, 0.012, size.ranks))
    first, last = legs[0].since, legs[-1].until
    every = max(STEP_S, min(16.0, (last - first) / 400))
    async with store.write() as session:
        for leg in legs:
            at = leg.since
            stored_rows: list[StepRow] = []
            while at <= leg.until:
                times = base * (1 + rng.normal(0, 0.01, size.ranks))
                share = (at - first) / max(1.0, last - first)
                disturb(times, share, size.ranks)
                newest = row(leg.attempt, leg.first, at)
                stored_rows.append(
                    StepRow(**{**newest.__dict__, "compute_s": tuple(times.tolist())})
                )
                at += every
            await rank_series.store_rows(session, job, stored_rows)


def disturb(times: Any, share: float, ranks: int) -> None:
    """Slow down ranks and nodes, each in its interval of the run."""
    if 0.2 < share < 0.31:
        times[SLOW_RANK % ranks] *= 1.25 + 1.2 * (share - 0.2) / 0.11
    if 0.52 < share < 0.60:
        times[184 % ranks : 192 % ranks or ranks] *= 1.3
    if share > 0.82:
        times[311 % ranks] *= 1.55
    if 0.66 < share < 0.72:
        times[(ranks // 2) :] *= 1.06
    if int(share * 900) % 45 == 0:
        times *= 1.05


def line(seq: int, at: float, rank: int, attempt: int, text: str) -> LogLine:
    return LogLine(
        agent=f"n{rank // PER_NODE}",
        incarnation="a",
        seq=seq,
        at=at,
        worker=f"n{rank // PER_NODE}.a.{rank % PER_NODE}",
        attempt=attempt,
        rank=rank,
        stream="stderr",
        text=text,
    )


TRACEBACK = (
    "ERROR the corpus did not answer in time",
    "Traceback (most recent call last):",
    '  File "/workspace/corpus/remote_shards.py", line 88, in fetch_shard',
    "    body = response.read(size)",
    '  File "/usr/lib/python3.12/ssl.py", line 1138, in read',
    "TimeoutError: The read operation timed out",
)


async def store_logs(store: Store, job: str, legs: list[Leg], size: Size) -> None:
    """Lines over the whole run; a few warnings, and errors around the faults."""
    rng = random.Random(5)
    since, until = legs[0].since, legs[-1].until
    total = sum(leg.last - leg.first + 1 for leg in legs)
    seqs: dict[int, int] = {}
    lines: list[LogLine] = []

    def add_line(at: float, rank: int, attempt: int, text: str) -> None:
        seqs[rank // PER_NODE] = seqs.get(rank // PER_NODE, 0) + 1
        lines.append(line(seqs[rank // PER_NODE], at, rank, attempt, text))

    for leg in legs:
        leg_lines = max(8, int(size.log_lines * (leg.last - leg.first + 1) / total))
        for n in range(leg_lines):
            at = leg.since + (leg.until - leg.since) * n / leg_lines
            step = leg.first + int((at - leg.since) / STEP_S)
            add_line(
                at, rng.randrange(size.ranks), leg.attempt, _line_text(rng, step, size.line_bytes)
            )
        if leg.fault is not None:
            at = leg.until + leg.fault.detect_s
            for text in (*TRACEBACK, *(f"ERROR {item}" for item in leg.fault.evidence)):
                add_line(at, leg.fault.ranks[0] % size.ranks, leg.attempt, text)
    assert since <= until
    for start in range(0, len(lines), 20_000):
        async with job_transaction(store, job) as tx:
            await series.store_logs(tx.session, tx.job, lines[start : start + 20_000])


def _line_text(rng: random.Random, step: int, length: int) -> str:
    which = rng.random()
    if which < 0.012:
        return f"WARNING reading shard {rng.randrange(4096)} took {rng.uniform(1, 4):.2f} s"
    if which < 0.2:
        return f"DEBUG prefetch holds {rng.randrange(2, 9)} batches for step {step + 2}"
    text = f"INFO step {step} loss {2 + rng.random() / 5:.4f} grad_norm {rng.random():.3f}"
    return f"{text} {'allocator: 61.2 GiB of 79.1 GiB, 3 segments ' * 50}"[:length]
