"""A big job as the store would have it after hours on a thousand ranks, for pages to be quick with.

Everything is written through the store's own functions, in the order in which a supervisor would
have told it, so that every view of the job is consistent. `python -m tests.web.seed FOLDER` fills
a data folder that `holdfast serve` can then be started on.
"""

from __future__ import annotations

import asyncio
import math
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import uuid_utils

from holdfast_service.job_spec import parse
from holdfast_service.lifecycle import Desired, State
from holdfast_service.quarantine import QuarantineRules
from holdfast_service.reports import EventKind, Phase, SupervisorEvent, SupervisorReport
from holdfast_service.settings import Settings
from holdfast_service.store import rank_series, series
from holdfast_service.store.engine import Store
from holdfast_service.store.models import AttemptMember, Job
from holdfast_service.store.projection import absorb
from holdfast_service.store.transaction import JobTransaction, job_transaction
from holdfast_workers.messages import Beat, LogLine, StepRow

PER_NODE = 8
NEVER = 1e12
"""When the job is due: no reconciler takes it, for there is no supervisor to be asked."""
STEP_S = 0.2
SLOW_RANK = 613
REFUSED = (
    ("ignore", "a process that computes is gone: nothing goes on without it"),
    ("re-form in place", "rank 0 is not there to be formed with"),
    ("replace the worker", "the node that it ran on does not answer"),
    ("roll back and skip a data window", "loss and gradients are finite: the data is not to blame"),
    ("shrink to a smaller mesh", "a standby is ready: nothing has to be given up"),
    ("wait for a replacement", "a standby is ready now"),
    ("stop", "1 of 20 failures within the hour: the job may go on"),
)


@dataclass(frozen=True)
class Size:
    """How big the job is. `steps`: rows of metrics, those that were thrown away included."""

    ranks: int = 1024
    steps: int = 100_000
    events: int = 10_000
    log_lines: int = 40_000
    line_bytes: int = 90


@dataclass(frozen=True)
class Fault:
    """A fault of the story, `after` so much of the run."""

    after: float
    cause: str
    ranks: tuple[int, ...]
    decision: str
    reason: str
    evidence: tuple[str, ...]
    lost: int
    phases_s: dict[str, float]
    detect_s: float = 0.02
    preempted: bool = False
    stacks: tuple[dict[str, Any], ...] = ()
    suspects: tuple[dict[str, Any], ...] = ()
    tier: str = "own_ram"


STACKS = (
    {
        "ranks": [SLOW_RANK],
        "frames": [
            "read (/usr/lib/python3.12/ssl.py:1138)",
            "readinto (/usr/lib/python3.12/socket.py:719)",
            "fetch_shard (/workspace/corpus/remote_shards.py:88)",
            "__next__ (/workspace/corpus/loader.py:61)",
            "next_batch (holdfast_workers/data/batches.py:44)",
            "train_step (holdfast_workers/loop.py:212)",
            "run (holdfast_workers/attempt.py:171)",
        ],
    },
    {
        "ranks": [rank for rank in range(1024) if rank != SLOW_RANK],
        "frames": [
            "all_reduce (torch/distributed/distributed_c10d.py:2928)",
            "agree (holdfast_workers/agreement.py:97)",
            "commit (holdfast_workers/loop.py:248)",
            "train_step (holdfast_workers/loop.py:221)",
            "run (holdfast_workers/attempt.py:171)",
        ],
    },
)
STORY = (
    Fault(
        0.14,
        "node_lost",
        tuple(range(328, 336)),
        "replace the node",
        "the node is gone, and standby n128 is ready to take its ranks",
        (
            "agent n41: its lifeline broke, and Ray says that its node is dead",
            "rank 327: connection reset by peer 10.4.5.41:29411 in reduce_scatter of dp_shard",
        ),
        lost=1,
        phases_s={
            "gather": 0.005,
            "fence": 0.041,
            "decide": 0.003,
            "form": 1.92,
            "restore": 3.41,
            "first_step": 0.61,
        },
        detect_s=1.8,
        tier="partner_ram",
    ),
    Fault(
        0.31,
        "hang",
        (SLOW_RANK,),
        "replace the worker",
        f"rank {SLOW_RANK} has stood in data of step 31,204 for 9.80 s (limit 4.20 s)",
        (
            f"rank {SLOW_RANK}: in data for longer than its limit, 9.80 s against 4.20 s",
            f"1,023 ranks wait for rank {SLOW_RANK} in all_reduce of world",
        ),
        lost=1,
        phases_s={
            "gather": 0.006,
            "fence": 0.052,
            "decide": 0.004,
            "form": 0.38,
            "restore": 0.22,
            "first_step": 0.44,
        },
        detect_s=9.8,
        stacks=STACKS,
        suspects=(
            {
                "rank": SLOW_RANK,
                "score": 0.93,
                "reasons": [
                    "1,023 ranks wait for it",
                    "in data for longer than its limit",
                    "stands elsewhere than most ranks",
                ],
                "agent": "n76",
                "worker": "n76.a.5",
            },
            {
                "rank": 614,
                "score": 0.19,
                "reasons": ["on the same node as the one that is likeliest"],
                "agent": "n76",
                "worker": "n76.a.6",
            },
        ),
    ),
    Fault(
        0.47,
        "guard",
        (902,),
        "roll back and skip a data window",
        "loss 11.4 is above its limit of 2.9; all ranks agreed to leave out a window",
        (
            "loss_spike at step 46,712: loss 11.42, limit 2.91, median of the last 128 steps 2.36",
            "began on rank 902 in layers.17.mlp.down_proj, micro-batch 3",
        ),
        lost=700,
        phases_s={
            "gather": 0.004,
            "fence": 0.038,
            "decide": 0.009,
            "form": 0.31,
            "restore": 5.2,
            "first_step": 0.39,
        },
        detect_s=0.01,
        tier="remote",
    ),
    Fault(
        0.63,
        "out_of_memory",
        (77,),
        "replace the worker",
        "the kernel ended rank 77 for want of memory; its node has room for another process",
        (
            "worker n9.a.5 (rank 77) was killed by signal 9",
            "memory.events of its cgroup: oom_kill 1; 63.8 GiB of 64 GiB in use",
        ),
        lost=1,
        phases_s={
            "gather": 0.005,
            "fence": 0.037,
            "decide": 0.002,
            "form": 0.29,
            "restore": 0.18,
            "first_step": 0.41,
        },
    ),
    Fault(
        0.74,
        "preempted",
        tuple(range(640, 648)),
        "replace the node",
        "its node is taken away in 120 s, and a standby is ready",
        ("Ray drains node 10.4.5.80 until 14:22:07: preemption",),
        lost=0,
        phases_s={
            "gather": 0.004,
            "fence": 0.04,
            "decide": 0.002,
            "form": 0.9,
            "restore": 1.1,
            "first_step": 0.4,
        },
        preempted=True,
        tier="partner_ram",
    ),
    Fault(
        0.9,
        "worker_crash",
        (311,),
        "replace the worker",
        "rank 311 crashed on a node that is well: another process takes its rank",
        (
            "worker n38.a.7 (rank 311) was killed by signal 11",
            "rank 310: connection closed by peer in all_gather of tp",
        ),
        lost=1,
        phases_s={
            "gather": 0.005,
            "fence": 0.036,
            "decide": 0.002,
            "form": 0.11,
            "restore": 0.07,
            "first_step": 0.38,
        },
    ),
)


@dataclass
class Leg:
    """Steps of one attempt, from `first` to `last`, the first of them ending at `since`."""

    attempt: int
    first: int
    last: int
    forming_at: float
    since: float
    fault: Fault | None = None
    until: float = field(init=False)

    def __post_init__(self) -> None:
        self.until = self.since + (self.last - self.first) * STEP_S


@dataclass
class Seeded:
    """What was written, so that tests can go on with it."""

    job_id: str
    leg: Leg
    since: float
    incidents: int


async def big_job(
    store: Store, size: Size | None = None, *, until: float | None = None, name: str = "atlas-7b"
) -> Seeded:
    """Write the job; its last step was made at `until` (now)."""
    size = size or Size()
    end = time.time() if until is None else until
    legs = _legs(size, end)
    job = await _submitted(store, size, name, legs[0].forming_at - 260)
    rows = [row for leg in legs for row in _rows(leg)]
    async with store.write() as session:
        for start in range(0, len(rows), 20_000):
            await series.store_rows(session, job, rows[start : start + 20_000])
    await _rank_times(store, job, legs, size)
    await _tell(store, job, legs, size)
    await _logs(store, job, legs, size)
    await _now(store, job, legs[-1], rows[-1], size)
    return Seeded(job, legs[-1], legs[0].forming_at - 260, len(legs) - 1)


async def more_steps(store: Store, seeded: Seeded, count: int) -> None:
    """The job goes on: `count` steps more, until now."""
    leg = seeded.leg
    now = time.time()
    rows = [
        _row(leg.attempt, leg.last + 1 + n, now - (count - 1 - n) * STEP_S) for n in range(count)
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
                _line(10_000_000 + row.step, row.at, 0, leg.attempt, f"step {row.step} live line")
                for row in rows
            ),
        )
        await absorb(tx, report, QuarantineRules(), hold_end=False)


async def open_incident(store: Store, seeded: Seeded) -> None:
    """A fault of now, that is being recovered from."""
    seeded.incidents += 1
    at = time.time()
    said = {
        **_incident(seeded.incidents, STORY[-1], seeded.leg, at, None),
        "evidence": ["worker n12.a.3 (rank 99) was killed by signal 6"],
        "resolution": None,
    }
    await _events(store, seeded.job_id, [(at, EventKind.INCIDENT_OPENED, said)])


def _legs(size: Size, end: float) -> list[Leg]:
    """The attempts, laid out backwards from `end` by first laying them out from zero."""
    legs: list[Leg] = []
    forming, first, made = 0.0, 1, 0
    since = forming + 71.0
    for fault in (*STORY, None):
        upto = int(size.steps * (fault.after if fault else 1.0))
        last = first + (upto - made) - 1
        leg = Leg(len(legs) + 1, first, last, forming, since, fault)
        legs.append(leg)
        made = upto
        if fault is not None:
            lost = min(fault.lost, leg.last - leg.first)
            first = leg.last - lost + 1
            signalled = leg.until + fault.detect_s
            phases = fault.phases_s
            forming = signalled + sum(phases.get(one, 0) for one in ("gather", "fence", "decide"))
            since = signalled + sum(phases.values())
    shift = end - legs[-1].until
    for leg in legs:
        leg.forming_at += shift
        leg.since += shift
        leg.until += shift
    return legs


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
        check_paths=False,
    )
    job = Job(
        id=str(uuid_utils.uuid7()),
        name=spec.name,
        spec=spec.model_dump(mode="json"),
        desired=Desired.RUNNING,
        state=State.QUEUED,
        created_at=at,
        request_digest="",
        steps=spec.train.steps,
        step=0,
        event_seq=0,
        due_at=NEVER,
    )
    async with store.write() as session:
        session.add(job)
        await session.flush()
        tx = JobTransaction(session, job, at)
        tx.emit("job.submitted", {"name": job.name})
        tx.transition(State.STARTING, at=at + 200)
    return job.id


def _row(attempt: int, step: int, at: float) -> StepRow:
    """Curves as a run has them: a power law with noise; a spike where the guard tripped."""
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


def _rows(leg: Leg) -> Iterator[StepRow]:
    for step in range(leg.first, leg.last + 1):
        yield _row(leg.attempt, step, leg.since + (step - leg.first) * STEP_S)


async def _rank_times(store: Store, job: str, legs: list[Leg], size: Size) -> None:
    """What each rank computed, every 16 s of the run, or more often in a short one."""
    rng = np.random.default_rng(11)
    base = 0.158 * (1 + rng.normal(0, 0.012, size.ranks))
    first, last = legs[0].since, legs[-1].until
    every = max(STEP_S, min(16.0, (last - first) / 400))
    async with store.write() as session:
        for leg in legs:
            at = leg.since
            told: list[StepRow] = []
            while at <= leg.until:
                times = base * (1 + rng.normal(0, 0.01, size.ranks))
                share = (at - first) / max(1.0, last - first)
                _disturb(times, share, size.ranks)
                row = _row(leg.attempt, leg.first, at)
                told.append(StepRow(**{**row.__dict__, "compute_s": tuple(times.tolist())}))
                at += every
            await rank_series.store_rows(session, job, told)


def _disturb(times: Any, share: float, ranks: int) -> None:
    """Slow ranks and nodes, each in its time."""
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


def _members(attempt: int, size: Size) -> list[dict[str, Any]]:
    moved = {41: 128} if attempt > 1 else {}
    if attempt > 5:
        moved[80] = 129
    members = []
    for rank in range(size.ranks):
        seat = moved.get(rank // PER_NODE, rank // PER_NODE)
        lives = 1 + sum(1 for one in STORY[: attempt - 1] if rank in one.ranks)
        members.append(
            {
                "rank": rank,
                "worker": f"n{seat}.a.{rank % PER_NODE + (lives - 1) * 16}",
                "agent": f"n{seat}",
                "node_id": f"10.4.5.{seat}",
                "host": f"10.4.5.{seat}",
                "pid": 4000 + rank % PER_NODE + (lives - 1) * 40,
                "role": "worker",
            }
        )
    return members


def _incident(
    number: int, fault: Fault, leg: Leg, signalled: float, closed: float | None
) -> dict[str, Any]:
    took = sum(fault.phases_s.values())
    phases = {"detect": 0.004, **fault.phases_s}
    lost = min(fault.lost, leg.last - leg.first)
    return {
        "incident": number,
        "cause": fault.cause,
        "causes": [fault.cause],
        "attempt": leg.attempt,
        "next_attempt": leg.attempt + 1,
        "lost": [
            {
                "cause": fault.cause,
                "rank": fault.ranks[0],
                "ranks": list(fault.ranks),
                "worker": None if len(fault.ranks) > 1 else f"n{fault.ranks[0] // 8}.a.3",
                "agent": f"n{fault.ranks[0] // 8}",
                "attempt": leg.attempt,
                "on_notice": fault.preempted,
            }
        ],
        "evidence": list(fault.evidence),
        "decision": fault.decision,
        "reason": fault.reason,
        "refused": [
            {"decision": decision, "why": why}
            for decision, why in REFUSED
            if decision != fault.decision
        ],
        "budget": {
            "failures": 0 if fault.preempted else 1,
            "max_failures": 20,
            "failures_left": 20 if fault.preempted else 19,
            "preemptions": 1 if fault.preempted else 0,
            "max_preemptions": 100,
            "without_progress": 1,
            "max_without_progress": 5,
            "window_s": 3600.0,
        },
        "restored_step": leg.last - lost,
        "steps_lost": lost,
        "tiers": {
            str(rank): fault.tier if rank in fault.ranks or fault.tier == "remote" else "own_ram"
            for rank in range(1024)
        },
        "phases_s": {**phases, "total": took} if closed else phases,
        "failures": [] if fault.preempted else [signalled],
        "preemptions": [signalled] if fault.preempted else [],
        "suspects": list(fault.suspects),
        "stacks": list(fault.stacks),
        "signalled_at": signalled,
        "opened_at": signalled,
        "closed_at": closed,
        "resolution": f"attempt {leg.attempt + 1} made its first step" if closed else None,
    }


Told = tuple[float, EventKind | str, dict[str, Any]]


async def _tell(store: Store, job: str, legs: list[Leg], size: Size) -> None:
    """All events in order of time: those that make rows, and as many others as are wanted."""
    told: list[Told] = []
    for number, leg in enumerate(legs):
        told += _of_leg(leg, number, size)
        following = legs[number + 1] if number + 1 < len(legs) else None
        if leg.fault is not None and following is not None:
            signalled = leg.until + leg.fault.detect_s
            told += _of_fault(number + 1, leg, following, signalled)
    told += _others(legs, max(0, size.events - len(told) - 12))
    await _events(store, job, sorted(told, key=lambda one: one[0]))
    async with store.write() as session:  # told by events, they would take ten times as long
        for leg in legs:
            session.add_all(
                AttemptMember(job_id=job, attempt=leg.attempt, **member)
                for member in _members(leg.attempt, size)
            )


def _of_leg(leg: Leg, number: int, size: Size) -> list[Told]:
    mesh = {"dp_shard": size.ranks // 8, "tp": 8}
    told: list[Told] = [
        (
            leg.forming_at,
            EventKind.ATTEMPT_FORMING,
            {
                "attempt": leg.attempt,
                "mesh": mesh,
                "world_size": size.ranks,
                "members": [],
                "standbys": [],
                "restore": {"step": leg.first - 1, "tiers": {}, "sources": {}},
                "cause_incident": number or None,
            },
        ),
        (
            leg.since - 0.35,
            EventKind.ATTEMPT_RUNNING,
            {"attempt": leg.attempt, "members": [], "joined": {}, "first_step": leg.first},
        ),
        (leg.since, EventKind.PHASE, {"phase": "RUNNING"}),
    ]
    every = max(1, size.steps // 40)
    for step in range(leg.first - leg.first % every + every, leg.last + 1, every):
        told.append(
            (
                leg.since + (step - leg.first) * STEP_S,
                EventKind.CHECKPOINT_SAVED,
                {
                    "step": step,
                    "attempt": leg.attempt,
                    "tier": "remote",
                    "uri": f"file:///checkpoints/step-{step:08d}-{leg.attempt}",
                    "nbytes": 81_604_378_624,
                    "mesh": mesh,
                    "metrics": {"loss": 2.2},
                },
            )
        )
    return told


def _of_fault(number: int, leg: Leg, following: Leg, signalled: float) -> list[Told]:
    fault = leg.fault
    assert fault is not None
    opened = {
        **_incident(number, fault, leg, signalled, None),
        "decision": None,
        "reason": None,
        "refused": [],
        "budget": None,
        "tiers": {},
        "restored_step": None,
        "steps_lost": None,
    }
    return [
        (signalled, EventKind.INCIDENT_OPENED, opened),
        (signalled + 0.001, EventKind.PHASE, {"phase": "RECOVERING"}),
        (
            signalled + 0.05,
            EventKind.ATTEMPT_ENDED,
            {"attempt": leg.attempt, "reason": fault.evidence[0], "last_step": leg.last},
        ),
        (
            following.since,
            EventKind.INCIDENT_CLOSED,
            _incident(number, fault, leg, signalled, following.since),
        ),
    ]


def _others(legs: list[Leg], count: int) -> list[Told]:
    """Events that change nothing but the history."""
    chance = random.Random(3)
    told: list[Told] = []
    for _ in range(count):
        leg = chance.choice(legs)
        at = chance.uniform(leg.since, max(leg.since, leg.until - 1))
        agent = f"n{chance.randrange(132)}"
        kind, data = chance.choice(
            [
                ("standby", {"agent": agent, "state": "warm"}),
                (
                    "stalled",
                    {"attempt": leg.attempt, "finding": "waiting", "reason": "a slow read"},
                ),
                (
                    "node.probed",
                    {"agent": agent, "probe": "network", "what": "412 Gb/s to its partner"},
                ),
            ]
        )
        told.append((at, kind, data))
    return told


async def _events(store: Store, job: str, told: list[Told]) -> None:
    """Store them; only those that make rows go the long way."""
    for start in range(0, len(told), 500):
        async with job_transaction(store, job, now=told[start][0]) as tx:
            for at, kind, data in told[start : start + 500]:
                if not isinstance(kind, EventKind):
                    tx.emit(kind, data, at=at)
                    continue
                seq = tx.job.cursor_event + 1
                event = SupervisorEvent(seq=seq, at=at, kind=kind, data=data)
                await absorb(tx, _report(tx, event), QuarantineRules(), hold_end=False)


def _report(tx: JobTransaction, event: SupervisorEvent) -> SupervisorReport:
    phase = Phase.RECOVERING if tx.state is State.RECOVERING else Phase.RUNNING
    if event.kind is EventKind.PHASE:
        phase = Phase(event.data["phase"])
    elif tx.state is State.STARTING:
        phase = Phase.STARTING
    return SupervisorReport(
        epoch=1, phase=phase, step=tx.job.step, attempt=tx.job.attempt, events=(event,)
    )


def _line(seq: int, at: float, rank: int, attempt: int, text: str) -> LogLine:
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


async def _logs(store: Store, job: str, legs: list[Leg], size: Size) -> None:
    """Lines over the whole run, a few of them loud, around the faults the loudest."""
    chance = random.Random(5)
    since, until = legs[0].since, legs[-1].until
    total = sum(leg.last - leg.first + 1 for leg in legs)
    seqs: dict[int, int] = {}
    lines: list[LogLine] = []

    def say(at: float, rank: int, attempt: int, text: str) -> None:
        seqs[rank // PER_NODE] = seqs.get(rank // PER_NODE, 0) + 1
        lines.append(_line(seqs[rank // PER_NODE], at, rank, attempt, text))

    for leg in legs:
        mine = max(8, int(size.log_lines * (leg.last - leg.first + 1) / total))
        for n in range(mine):
            at = leg.since + (leg.until - leg.since) * n / mine
            step = leg.first + int((at - leg.since) / STEP_S)
            say(at, chance.randrange(size.ranks), leg.attempt, _said(chance, step, size.line_bytes))
        if leg.fault is not None:
            at = leg.until + leg.fault.detect_s
            for text in (*TRACEBACK, *(f"ERROR {one}" for one in leg.fault.evidence)):
                say(at, leg.fault.ranks[0] % size.ranks, leg.attempt, text)
    assert since <= until
    for start in range(0, len(lines), 20_000):
        async with job_transaction(store, job) as tx:
            await series.store_logs(tx.session, tx.job, lines[start : start + 20_000])


def _said(chance: random.Random, step: int, length: int) -> str:
    which = chance.random()
    if which < 0.012:
        return f"WARNING reading shard {chance.randrange(4096)} took {chance.uniform(1, 4):.2f} s"
    if which < 0.2:
        return f"DEBUG prefetch holds {chance.randrange(2, 9)} batches for step {step + 2}"
    text = f"INFO step {step} loss {2 + chance.random() / 5:.4f} grad_norm {chance.random():.3f}"
    return f"{text} {'allocator: 61.2 GiB of 79.1 GiB, 3 segments ' * 50}"[:length]


async def _now(store: Store, job: str, leg: Leg, newest: StepRow, size: Size) -> None:
    """How the job stands: its last rows by the usual way, and where each rank is."""
    members = {one["rank"]: one for one in _members(leg.attempt, size)}
    chance = random.Random(9)
    beats = tuple(
        Beat(
            rank=rank,
            worker=members[rank]["worker"],
            pid=members[rank]["pid"],
            attempt=leg.attempt,
            step=newest.step + 1,
            phase=chance.choice(("forward", "forward", "backward", "backward", "optimizer")),
            micro_batch=chance.randrange(4),
            age_s=abs(chance.gauss(0.02, 0.02)),
            limit_s=4.2,
        )
        for rank in range(size.ranks)
    )
    times = 0.158 * (1 + np.random.default_rng(2).normal(0, 0.012, size.ranks))
    _disturb(times, 0.95, size.ranks)
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
        "why": "its times are 1.55 times those of its peers",
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
        await absorb(tx, report, QuarantineRules(), hold_end=False)


async def _main(folder: Path) -> None:
    store = await Store.open(Settings(data_dir=folder))
    begun = time.monotonic()
    seeded = await big_job(store)
    print(seeded.job_id, f"{time.monotonic() - begun:.1f} s")
    await store.close()


if __name__ == "__main__":
    asyncio.run(_main(Path(sys.argv[1])))
