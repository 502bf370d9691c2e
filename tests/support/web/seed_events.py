"""What the supervisor of a seeded job told: attempts, incidents, checkpoints, and much that only
fills the history."""

from __future__ import annotations

import random
from typing import Any

from tests.support.web.seed_story import STEP_S, Leg, Size, incident, members

from holdfast_service.job_model.lifecycle import Phase, State
from holdfast_service.job_model.supervisor_protocol import (
    EventKind,
    SupervisorEvent,
    SupervisorReport,
)
from holdfast_service.policy.quarantine import QuarantineRules
from holdfast_service.store.engine import Store
from holdfast_service.store.models import AttemptMember
from holdfast_service.store.projection import store_report
from holdfast_service.store.transaction import JobTransaction, job_transaction

Told = tuple[float, EventKind | str, dict[str, Any]]


async def store_history(store: Store, job: str, legs: list[Leg], size: Size) -> None:
    """All events in order of time: those that make rows, and as many others as are wanted."""
    told: list[Told] = []
    for number, leg in enumerate(legs):
        told += _of_leg(leg, number, size)
        following = legs[number + 1] if number + 1 < len(legs) else None
        if leg.fault is not None and following is not None:
            signalled = leg.until + leg.fault.detect_s
            told += _of_fault(number + 1, leg, following, signalled)
    told += _others(legs, max(0, size.events - len(told) - 12))
    await store_events(store, job, sorted(told, key=lambda one: one[0]))
    async with store.write() as session:  # told by events, they would take ten times as long
        for leg in legs:
            session.add_all(
                AttemptMember(job_id=job, attempt=leg.attempt, **member)
                for member in members(leg.attempt, size)
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
        **incident(number, fault, leg, signalled, None),
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
            incident(number, fault, leg, signalled, following.since),
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


async def store_events(store: Store, job: str, told: list[Told]) -> None:
    """Store them; only those that make rows go the long way."""
    for start in range(0, len(told), 500):
        async with job_transaction(store, job, now=told[start][0]) as tx:
            for at, kind, data in told[start : start + 500]:
                if not isinstance(kind, EventKind):
                    tx.emit(kind, data, at=at)
                    continue
                seq = tx.job.cursor_event + 1
                event = SupervisorEvent(seq=seq, at=at, kind=kind, data=data)
                await store_report(tx, _report(tx, event), QuarantineRules(), hold_end=False)


def _report(tx: JobTransaction, event: SupervisorEvent) -> SupervisorReport:
    phase = Phase.RECOVERING if tx.state is State.RECOVERING else Phase.RUNNING
    if event.kind is EventKind.PHASE:
        phase = Phase(event.data["phase"])
    elif tx.state is State.STARTING:
        phase = Phase.STARTING
    return SupervisorReport(
        epoch=1, phase=phase, step=tx.job.step, attempt=tx.job.attempt, events=(event,)
    )
