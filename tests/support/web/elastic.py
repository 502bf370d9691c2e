"""An elastic job in the store that has lost a node, shrunk, and grown again when a node came.

The job is never due, so no reconciler changes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.support.service.live_server import SPEC
from tests.support.web.seed_events import TimedEvent, started_job, store_events
from tests.support.web.seed_series import row
from tests.support.web.seed_story import STEP_S

from holdfast_service.job_model.job_spec import parse
from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_service.store import series
from holdfast_service.store.engine import Store
from holdfast_service.store.models import JobRecord

ELASTIC: dict[str, Any] = {
    **SPEC,
    "name": "elastic",
    "train": {**SPEC["train"], "steps": 9_000, "global_batch": 32},
    "parallel": {"dp_shard": "auto", "tp": 2},
    "resources": {"workers_per_node": 2, "nodes": {"min": 1, "max": 4}},
}
LOST_AT, BACK_AT, END = 200.0, 400.0, 600.0
"""Seconds since the submission."""


@dataclass(frozen=True)
class Stage:
    """An attempt. Its first step ends at `since`, its last before `until`."""

    dp_shard: int
    forming_at: float
    since: float
    until: float
    incident: int | None = None

    @property
    def steps(self) -> int:
        return int((self.until - self.since) / STEP_S)

    @property
    def mesh(self) -> dict[str, int]:
        return {"dp_shard": self.dp_shard, "tp": 2}


STAGES = (
    Stage(4, 30.0, 40.0, LOST_AT),
    Stage(3, LOST_AT + 2.0, LOST_AT + 5.0, BACK_AT, incident=1),
    Stage(4, BACK_AT + 0.5, BACK_AT + 1.5, END, incident=2),
)
SHRINK: dict[str, Any] = {
    "cause": "node_lost",
    "lost": [{"cause": "node_lost", "ranks": [6, 7], "agent": "n3"}],
    "evidence": ["agent n3: its connection broke"],
    "decision": "shrink to a smaller mesh",
    "reason": "a smaller mesh trains on while nodes are missing",
    "phases_s": {"gather": 0.01, "fence": 0.5, "form": 1.5, "restore": 3.0, "total": 5.01},
    "failures": [LOST_AT],
}
GROW: dict[str, Any] = {
    "cause": "resize",
    "lost": [{"cause": "resize"}],
    "evidence": ["8 ranks have room on 4 nodes since 30 s, in place of 6 ranks"],
    "decision": "grow to a larger mesh",
    "reason": "a larger mesh is worth the pause; the state is resharded from memory",
    "phases_s": {"fence": 0.1, "form": 0.4, "restore": 1.0, "total": 1.5},
    "preemptions": [BACK_AT],
}


async def elastic_job(store: Store, submitted_at: float) -> str:
    """Write the job; returns its id."""
    spec = parse(ELASTIC, None)
    job_id = await started_job(store, spec, submitted_at, submitted_at + 20)
    for number, stage in enumerate(STAGES, 1):
        rows = [
            row(number, _first_step(number) + step, submitted_at + stage.since + step * STEP_S)
            for step in range(stage.steps)
        ]
        async with store.write() as session:
            await series.store_rows(session, job_id, rows)
    await store_events(store, job_id, _events(submitted_at))
    async with store.write() as session:
        job = await session.get_one(JobRecord, job_id)
        job.told_at = submitted_at + END
    return job_id


def _first_step(attempt: int) -> int:
    return 1 + sum(stage.steps for stage in STAGES[: attempt - 1])


def _events(begin: float) -> list[TimedEvent]:
    events: list[TimedEvent] = []
    for number, stage in enumerate(STAGES, 1):
        ranks = range(2 * stage.dp_shard)
        forming = {
            "attempt": number,
            "mesh": stage.mesh,
            "world_size": len(ranks),
            "members": [
                {"rank": rank, "agent": f"n{rank // 2}", "node_id": f"node{rank // 2}"}
                for rank in ranks
            ],
            "restore": {"step": _first_step(number) - 1},
            "cause_incident": stage.incident,
        }
        running = {"attempt": number, "first_step": _first_step(number)}
        events += [
            (begin + stage.forming_at, EventKind.ATTEMPT_FORMING, forming),
            (begin + stage.since, EventKind.ATTEMPT_RUNNING, running),
            (begin + stage.since, EventKind.PHASE, {"phase": "RUNNING"}),
        ]
    for number, at, facts in ((1, LOST_AT, SHRINK), (2, BACK_AT, GROW)):
        took = facts["phases_s"]["total"]
        record = {
            **facts,
            "incident": number,
            "causes": [facts["cause"]],
            "attempt": number,
            "next_attempt": number + 1,
            "signalled_at": begin + at,
            "opened_at": begin + at,
            "steps_lost": 0,
        }
        closed = {**record, "closed_at": begin + at + took, "resolution": "the job runs again"}
        phase = "RECOVERING" if number == 1 else "RESIZING"
        events += [
            (begin + at, EventKind.INCIDENT_OPENED, record),
            (begin + at + 0.01, EventKind.PHASE, {"phase": phase}),
            (begin + at + took, EventKind.INCIDENT_CLOSED, closed),
        ]
    return sorted(events, key=lambda event: event[0])
