"""Figures of all jobs together, for those who watch the service: from the store, so that every
server tells the same and a restart forgets nothing. Incidents are read once: as they close.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_service.store.engine import Store
from holdfast_service.store.latency_histogram import Distribution
from holdfast_service.store.models import Incident, Job

LOOK_BACK_S = 600.0
"""An incident may be stored so much later than it closed, and is counted all the same."""


@dataclass
class FleetFigures:
    jobs: Mapping[str, int] = field(default_factory=dict)
    """By state."""
    incidents: Counter[tuple[str, str]] = field(default_factory=Counter)
    """That have closed, by cause and decision."""
    phases: Mapping[str, Distribution] = field(default_factory=dict)
    """How long each phase of their recoveries took."""
    lost_steps: int = 0
    effective_s: float = 0.0
    """In steps that are part of history, all jobs together."""
    held_s: float = 0.0
    """On the cluster, jobs that have left it and those that are on it."""

    @property
    def goodput(self) -> float | None:
        return min(1.0, self.effective_s / self.held_s) if self.held_s > 0 else None


class Fleet:
    """One reader of the store; asked by one request at a time or by several, it is the same."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._incidents: Counter[tuple[str, str]] = Counter()
        self._phases: dict[str, Distribution] = {}
        self._lost_steps = 0
        self._counted: dict[tuple[str, int], float] = {}
        self._until = 0.0

    @property
    def transitions(self) -> Mapping[tuple[str, str, str], int]:
        """That this process has stored since it began: (from, to, code of the outcome or "")."""
        return self._store.transitions

    @property
    def checkpoints(self) -> Mapping[tuple[str, str], Distribution]:
        """That this process has stored since it began, by tier and operation."""
        return self._store.checkpoints

    @property
    def reconcile_lag(self) -> Distribution:
        """Of this process since it began."""
        return self._store.reconcile_lag

    async def figures(self, now: float) -> FleetFigures:
        async with self._store.read(long=True) as session:
            states = await session.execute(select(Job.state, func.count()).group_by(Job.state))
            held = func.sum(Job.held_s), func.sum(now - Job.held_since), func.sum(Job.productive_s)
            left_s, present_s, effective_s = (await session.execute(select(*held))).one()
            await self._count_incidents(session)
            return FleetFigures(
                jobs={row[0]: row[1] for row in states},
                incidents=Counter(self._incidents),
                phases=dict(self._phases),
                lost_steps=self._lost_steps,
                effective_s=effective_s or 0.0,
                held_s=(left_s or 0.0) + max(0.0, present_s or 0.0),
            )

    async def _count_incidents(self, session: AsyncSession) -> None:
        closed = await session.execute(
            select(Incident.job_id, Incident.number, Incident.closed_at, Incident.data)
            .where(Incident.closed_at > self._until - LOOK_BACK_S)
            .order_by(Incident.closed_at)
        )
        for job_id, number, closed_at, data in closed:
            if closed_at is None or (job_id, number) in self._counted:
                continue
            self._counted[job_id, number] = closed_at
            self._until = max(self._until, closed_at)
            self._incidents[str(data.get("cause", "")), str(data.get("decision", ""))] += 1
            self._lost_steps += int(data.get("steps_lost") or 0)
            for phase, taken_s in (data.get("phases_s") or {}).items():
                self._phases.setdefault(phase, Distribution()).add(float(taken_s))
        old = self._until - LOOK_BACK_S
        self._counted = {key: at for key, at in self._counted.items() if at > old}
