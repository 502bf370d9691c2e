"""The story of a seeded job: its size, its faults, and the attempts between them. Only data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

PER_NODE = 8
STEP_S = 0.2
SLOW_RANK = 613
LOST_NODE_ID = "ab12cd34" + "5e6f" * 12
"""A node id as Ray writes it: 56 hex digits."""
REFUSED = (
    ("ignore", "a computing process was lost, and training cannot continue without it"),
    ("re-form in place", "rank 0 is missing"),
    ("replace the worker", "its node does not answer"),
    (
        "roll back and skip a data window",
        "loss and gradients are finite, so the data is not the cause",
    ),
    ("shrink to a smaller mesh", "a standby is ready, so the mesh can stay"),
    ("wait for a replacement", "a standby is ready now"),
    ("stop", "1 of 20 failures within the hour, so the job may continue"),
)


@dataclass(frozen=True)
class Size:
    """The size of the job. `steps`: rows of metrics, discarded rows included."""

    ranks: int = 1024
    steps: int = 100_000
    events: int = 10_000
    log_lines: int = 40_000
    line_bytes: int = 90


@dataclass(frozen=True)
class Fault:
    """A fault of the story, after the share `after` of the run."""

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


PHASES = ("gather", "fence", "decide", "form", "restore", "first_step")


def _phases(*durations_s: float) -> dict[str, float]:
    return dict(zip(PHASES, durations_s, strict=True))


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
        "the node is lost, and standby n128 is ready to take its ranks",
        (
            f"agent n41: its connection broke, and Ray reports that node {LOST_NODE_ID} is dead",
            "rank 327: connection reset by peer 10.4.5.41:29411 in reduce_scatter of dp_shard",
        ),
        lost=1,
        phases_s=_phases(0.005, 0.041, 0.003, 1.92, 3.41, 0.61),
        detect_s=1.8,
        tier="partner_ram",
    ),
    Fault(
        0.31,
        "hang",
        (SLOW_RANK,),
        "replace the worker",
        f"rank {SLOW_RANK} has been in data of step 31,204 for 9.80 s (limit 4.20 s)",
        (
            f"rank {SLOW_RANK}: in data for longer than its limit, 9.80 s against 4.20 s",
            f"1,023 ranks wait for rank {SLOW_RANK} in all_reduce of world",
        ),
        lost=1,
        phases_s=_phases(0.006, 0.052, 0.004, 0.38, 0.22, 0.44),
        detect_s=9.8,
        stacks=STACKS,
        suspects=(
            {
                "rank": SLOW_RANK,
                "score": 0.93,
                "reasons": [
                    "1,023 ranks wait for it",
                    "in data for longer than its limit",
                    "its stack differs from most ranks",
                ],
                "agent": "n76",
                "worker": "n76.a.5",
            },
            {
                "rank": 614,
                "score": 0.19,
                "reasons": ["on the same node as the most likely rank"],
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
        "loss 11.4 is above its limit of 2.9; all ranks agreed to skip a window",
        (
            "loss_spike at step 46,712: loss 11.42, limit 2.91, median of the last 128 steps 2.36",
            "began on rank 902 in layers.17.mlp.down_proj, micro-batch 3",
        ),
        lost=700,
        phases_s=_phases(0.004, 0.038, 0.009, 0.31, 5.2, 0.39),
        detect_s=0.01,
        tier="remote",
    ),
    Fault(
        0.63,
        "out_of_memory",
        (77,),
        "replace the worker",
        "the kernel killed rank 77 because memory ran out; its node can run another process",
        (
            "worker n9.a.5 (rank 77) was killed by signal 9",
            "memory.events of its cgroup: oom_kill 1; 63.8 GiB of 64 GiB in use",
        ),
        lost=1,
        phases_s=_phases(0.005, 0.037, 0.002, 0.29, 0.18, 0.41),
    ),
    Fault(
        0.74,
        "preempted",
        tuple(range(640, 648)),
        "replace the node",
        "the cluster preempts its node in 120 s, and a standby is ready",
        ("Ray drains node 10.4.5.80 until 14:22:07: preemption",),
        lost=0,
        phases_s=_phases(0.004, 0.04, 0.002, 0.9, 1.1, 0.4),
        preempted=True,
        tier="partner_ram",
    ),
    Fault(
        0.9,
        "worker_crash",
        (311,),
        "replace the worker",
        "rank 311 crashed on a healthy node, so another process takes its rank",
        (
            "worker n38.a.7 (rank 311) was killed by signal 11",
            "rank 310: connection closed by peer in all_gather of tp",
        ),
        lost=1,
        phases_s=_phases(0.005, 0.036, 0.002, 0.11, 0.07, 0.38),
    ),
)


@dataclass
class Leg:
    """The steps of an attempt, `first` to `last`; the first of them ends at `since`."""

    attempt: int
    first: int
    last: int
    forming_at: float
    since: float
    fault: Fault | None = None
    until: float = field(init=False)

    def __post_init__(self) -> None:
        self.until = self.since + (self.last - self.first) * STEP_S


def legs_of(size: Size, end: float) -> list[Leg]:
    """The attempts; computed from time zero and then shifted so that the last ends at `end`."""
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
            forming = signalled + sum(
                phases.get(phase, 0) for phase in ("gather", "fence", "decide")
            )
            since = signalled + sum(phases.values())
    shift = end - legs[-1].until
    for leg in legs:
        leg.forming_at += shift
        leg.since += shift
        leg.until += shift
    return legs


def members(attempt: int, size: Size) -> list[dict[str, Any]]:
    moved = {41: 128} if attempt > 1 else {}
    if attempt > 5:
        moved[80] = 129
    members = []
    for rank in range(size.ranks):
        node = moved.get(rank // PER_NODE, rank // PER_NODE)
        processes = 1 + sum(1 for fault in STORY[: attempt - 1] if rank in fault.ranks)
        members.append(
            {
                "rank": rank,
                "worker": f"n{node}.a.{rank % PER_NODE + (processes - 1) * 16}",
                "agent": f"n{node}",
                "node_id": f"10.4.5.{node}",
                "host": f"10.4.5.{node}",
                "pid": 4000 + rank % PER_NODE + (processes - 1) * 40,
                "role": "worker",
            }
        )
    return members


def incident(
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
        "resolution": f"attempt {leg.attempt + 1} made its first step" if closed else "",
    }
