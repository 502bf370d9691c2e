"""A big job in the store, like after hours on a thousand ranks, for tests of the pages' speed.

The store's own functions write all data, in the order in which a supervisor would report it, so
that every view of the job is consistent. `python -m tests.support.web.seed FOLDER` fills a data
folder for `holdfast serve`.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tests.support.web.seed_events import started_job, store_events, store_history
from tests.support.web.seed_series import disturb, line, row, rows, store_logs, store_rank_times
from tests.support.web.seed_story import (
    LOST_NODE_ID,
    PER_NODE,
    STEP_S,
    STORY,
    Leg,
    Size,
    incident,
    legs_of,
    members,
)

from holdfast_service.job_model.job_spec import parse
from holdfast_service.job_model.lifecycle import Phase
from holdfast_service.job_model.supervisor_protocol import (
    EventKind,
    SupervisorEvent,
    SupervisorReport,
)
from holdfast_service.policy.quarantine import QuarantineRules
from holdfast_service.settings import Settings
from holdfast_service.store import series
from holdfast_service.store.engine import Store
from holdfast_service.store.projection import store_report
from holdfast_service.store.transaction import job_transaction
from holdfast_workers.protocol.messages import Beat, StepRow

__all__ = [
    "LOST_NODE_ID",
    "STORY",
    "Seeded",
    "Size",
    "big_job",
    "close_incident",
    "more_steps",
    "open_incident",
]


@dataclass
class Seeded:
    """The written job, for tests that extend it."""

    job_id: str
    leg: Leg
    since: float
    incidents: int


async def big_job(
    store: Store, size: Size | None = None, *, until: float | None = None, name: str = "atlas-7b"
) -> Seeded:
    """Write the job; its last step ended at `until` (default: now)."""
    size = size or Size()
    end = time.time() if until is None else until
    legs = legs_of(size, end)
    job = await _submitted(store, size, name, legs[0].forming_at - 260)
    step_rows = [step_row for leg in legs for step_row in rows(leg)]
    async with store.write() as session:
        for start in range(0, len(step_rows), 20_000):
            await series.store_rows(session, job, step_rows[start : start + 20_000])
    await store_rank_times(store, job, legs, size)
    await store_history(store, job, legs, size)
    await store_logs(store, job, legs, size)
    await _store_present_state(store, job, legs[-1], step_rows[-1], size)
    return Seeded(job, legs[-1], legs[0].forming_at - 260, len(legs) - 1)


async def more_steps(store: Store, seeded: Seeded, count: int) -> None:
    """Add `count` steps, the last of them now."""
    leg = seeded.leg
    now = time.time()
    rows = [
        row(leg.attempt, leg.last + 1 + n, now - (count - 1 - n) * STEP_S) for n in range(count)
    ]
    leg.last += count
    async with job_transaction(store, seeded.job_id) as tx:
        report = SupervisorReport(
            epoch=1,
            phase=Phase.RUNNING,
            step=leg.last,
            attempt=leg.attempt,
            rows=tuple(rows),
            logs=tuple(
                line(10_000_000 + row.step, row.at, 0, leg.attempt, f"step {row.step} live line")
                for row in rows
            ),
        )
        await store_report(tx, report, QuarantineRules(), hold_end=False)


async def open_incident(store: Store, seeded: Seeded) -> None:
    """Open an incident now; its recovery is in progress."""
    seeded.incidents += 1
    at = time.time()
    opened = {
        **incident(seeded.incidents, STORY[-1], seeded.leg, at, None),
        "evidence": ["worker n12.a.3 (rank 99) was killed by signal 6"],
    }
    await store_events(store, seeded.job_id, [(at, EventKind.INCIDENT_OPENED, opened)])


async def close_incident(store: Store, seeded: Seeded) -> None:
    """Close the incident that :func:`open_incident` has opened."""
    at = time.time()
    closed = incident(seeded.incidents, STORY[-1], seeded.leg, at, at)
    await store_events(store, seeded.job_id, [(at, EventKind.INCIDENT_CLOSED, closed)])


async def _submitted(store: Store, size: Size, name: str, at: float) -> str:
    spec = parse(
        {
            "name": name,
            "recipe": "pretrain",
            "model": {
                "family": "llama",
                "dim": 4096,
                "layers": 32,
                "heads": 32,
                "kv_heads": 8,
                "sequence_length": 4096,
            },
            "data": {"source": "python-stdlib", "tokenizer": "bytes"},
            "train": {
                "steps": int(size.steps * 1.6),
                "global_batch": size.ranks,
                "micro_batch": 4,
                "seed": 7,
                "schedule": {"name": "cosine", "warmup_steps": size.steps // 50},
            },
            "parallel": {"dp_shard": size.ranks // 8, "tp": 8},
            "resources": {
                "workers_per_node": PER_NODE,
                "cpus_per_worker": 4,
                "gpus_per_worker": 1,
                "standby_nodes": 4,
            },
        },
        None,
    )
    return await started_job(store, spec, at, at + 200)


async def _store_present_state(
    store: Store, job: str, leg: Leg, newest: StepRow, size: Size
) -> None:
    """The present state of the job: its last rows as reports, and the place of each rank."""
    placed = {member["rank"]: member for member in members(leg.attempt, size)}
    rng = random.Random(9)
    beats = tuple(
        Beat(
            rank=rank,
            worker=placed[rank]["worker"],
            pid=placed[rank]["pid"],
            attempt=leg.attempt,
            step=newest.step + 1,
            phase=rng.choice(("forward", "forward", "backward", "backward", "optimizer")),
            micro_batch=rng.randrange(4),
            age_s=abs(rng.gauss(0.02, 0.02)),
            limit_s=4.2,
        )
        for rank in range(size.ranks)
    )
    times = 0.158 * (1 + np.random.default_rng(2).normal(0, 0.012, size.ranks))
    disturb(times, 0.95, size.ranks)
    final = StepRow(
        **{
            **newest.__dict__,
            "step": newest.step + 1,
            "at": newest.at + STEP_S,
            "compute_s": tuple(times.tolist()),
        }
    )
    leg.last += 1
    slow = {
        "rank": 311 % size.ranks,
        "agent": f"n{311 % size.ranks // PER_NODE}",
        "node_id": f"10.4.5.{311 % size.ranks // PER_NODE}",
        "host": f"10.4.5.{311 % size.ranks // PER_NODE}",
        "factor": 1.55,
        "since_step": leg.first + 20,
        "step": leg.last,
        "since": leg.since + 4,
        "attempt": leg.attempt,
        "state": "slow",
        "why": "it takes 1.55 times as long as its peers",
    }
    async with job_transaction(store, job) as tx:
        event = SupervisorEvent(tx.job.cursor_event + 1, final.at, EventKind.STRAGGLER, slow)
        report = SupervisorReport(
            epoch=1,
            phase=Phase.RUNNING,
            step=leg.last,
            attempt=leg.attempt,
            events=(event,),
            rows=(final,),
            beats=beats,
        )
        await store_report(tx, report, QuarantineRules(), hold_end=False)


async def _main(folder: Path) -> None:
    store = await Store.open(Settings(data_dir=folder))
    started = time.monotonic()
    seeded = await big_job(store)
    print(seeded.job_id, f"{time.monotonic() - started:.1f} s")
    await store.close()


if __name__ == "__main__":
    asyncio.run(_main(Path(sys.argv[1])))
