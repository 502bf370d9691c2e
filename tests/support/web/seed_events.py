"""The events of a seeded job: attempts, incidents, checkpoints, and many others that only fill the
history."""

from __future__ import annotations

import random
from typing import Any

import uuid_utils
from tests.support.web.seed_story import STEP_S, Leg, Size, incident, members

from holdfast_service.job_model.events.codec import UnknownEvent
from holdfast_service.job_model.events.progress import JobSubmittedEvent
from holdfast_service.job_model.job_spec import JobSpec
from holdfast_service.job_model.lifecycle import Desired, Phase, State
from holdfast_service.job_model.supervisor_protocol import (
    EventKind,
    SupervisorEvent,
    SupervisorReport,
)
from holdfast_service.policy.quarantine import QuarantineRules
from holdfast_service.store.engine import Store
from holdfast_service.store.models import AttemptMember, JobRecord
from holdfast_service.store.projection import store_report
from holdfast_service.store.transaction import JobTransaction, job_transaction

TimedEvent = tuple[float, EventKind | str, dict[str, Any]]
NEVER = 1e12
"""When a seeded job is due: no reconciler changes it."""


async def started_job(store: Store, spec: JobSpec, submitted_at: float, started_at: float) -> str:
    """Store a job that is on the cluster since `started_at`; its id."""
    job_id = await queued_job(store, spec, submitted_at, due_at=NEVER)
    async with job_transaction(store, job_id, now=started_at) as tx:
        tx.transition(State.STARTING)
    return job_id


async def queued_job(store: Store, spec: JobSpec, at: float, due_at: float = 0.0) -> str:
    """Store a job that was submitted at that time; its id."""
    job = JobRecord(
        id=str(uuid_utils.uuid7()),
        name=spec.name,
        spec=spec.model_dump(mode="json"),
        desired=Desired.RUNNING,
        state=State.QUEUED,
        created_at=at,
        queued_at=at,
        request_digest="",
        steps=(spec.program.steps or 0) if spec.brings_program else spec.train.steps,
        step=None if spec.brings_program else 0,
        owner=spec.labels.get("owner"),
        priority=spec.priority,
        event_seq=0,
        due_at=due_at,
    )
    async with store.write() as session:
        session.add(job)
        await session.flush()
        JobTransaction(session, job, at).emit(JobSubmittedEvent(name=job.name))
    return job.id


async def store_history(store: Store, job: str, legs: list[Leg], size: Size) -> None:
    """All events in order of time: events that create rows, and others up to `size.events`."""
    events: list[TimedEvent] = []
    for number, leg in enumerate(legs):
        events += _leg_events(leg, number, size)
        following = legs[number + 1] if number + 1 < len(legs) else None
        if leg.fault is not None and following is not None:
            signalled = leg.until + leg.fault.detect_s
            events += _fault_events(number + 1, leg, following, signalled)
    events += _other_events(legs, max(0, size.events - len(events) - 12))
    await store_events(store, job, sorted(events, key=lambda event: event[0]))
    async with store.write() as session:  # ten times as fast as through events
        for leg in legs:
            session.add_all(
                AttemptMember(job_id=job, attempt=leg.attempt, **member)
                for member in members(leg.attempt, size)
            )


def _leg_events(leg: Leg, number: int, size: Size) -> list[TimedEvent]:
    mesh = {"dp_shard": size.ranks // 8, "tp": 8}
    events: list[TimedEvent] = [
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
        events.append(
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
    return events


def _fault_events(number: int, leg: Leg, following: Leg, signalled: float) -> list[TimedEvent]:
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


def _other_events(legs: list[Leg], count: int) -> list[TimedEvent]:
    """Events that only extend the history."""
    rng = random.Random(3)
    events: list[TimedEvent] = []
    for _ in range(count):
        leg = rng.choice(legs)
        at = rng.uniform(leg.since, max(leg.since, leg.until - 1))
        agent = f"n{rng.randrange(132)}"
        choices: list[tuple[str, dict[str, Any]]] = [
            ("standby", {"agent": agent, "state": "warm"}),
            ("stalled", {"attempt": leg.attempt, "finding": "waiting", "reason": "a slow read"}),
            (
                "node.probed",
                {"agent": agent, "probe": "network", "what": "412 Gb/s to its partner"},
            ),
        ]
        kind, data = rng.choice(choices)
        events.append((at, kind, data))
    return events


async def store_events(store: Store, job: str, events: list[TimedEvent]) -> None:
    """Store the events; only events that create rows are stored as a report."""
    for start in range(0, len(events), 500):
        async with job_transaction(store, job, now=events[start][0]) as tx:
            for at, kind, data in events[start : start + 500]:
                if not isinstance(kind, EventKind):
                    tx.emit(UnknownEvent(kind, data), at=at)
                    continue
                seq = tx.job.cursor_event + 1
                event = SupervisorEvent(seq=seq, at=at, kind=kind, data=data)
                await store_report(tx, _report(tx, event), QuarantineRules(), hold_end=False)


def _report(tx: JobTransaction, event: SupervisorEvent) -> SupervisorReport:
    phase = Phase.RECOVERING if tx.state is State.RECOVERING else Phase.RUNNING
    if event.kind == EventKind.PHASE:
        phase = Phase(event.data["phase"])
    elif tx.state is State.STARTING:
        phase = Phase.STARTING
    return SupervisorReport(
        epoch=1, phase=phase, step=tx.job.step, attempt=tx.job.attempt, events=(event,)
    )
