"""A job of a random history of the queue, with the real record that the store keeps of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_service.job_model.admission import KEEP_PLACE, NodeDemand
from holdfast_service.job_model.lifecycle import State
from holdfast_service.store.models import JobRecord
from holdfast_service.store.transaction import JobTransaction


class _NoDatabase:
    """Where the events of a job's record go."""

    def add(self, row: object) -> None: ...


ENDLESS = 1_000_000


@dataclass
class SimulatedJob:
    number: int
    demand: NodeDemand
    work: int
    """Ticks that it still has to run with enough nodes; ENDLESS: until it is cancelled."""
    since: int
    """When it came into the queue."""
    is_possible: bool
    """Whether it fits into the whole cluster."""
    record: JobRecord
    """What the store keeps of it."""
    priority: int = 0
    is_admitted: bool = False
    unsuitable: set[str] = field(default_factory=set)
    """Nodes that are too small for it alone."""
    nodes: list[str] = field(default_factory=list)
    limit: int = 0
    """Most nodes that it takes; 0: as many as it may."""
    admitted_at: int = 0
    is_kept_off: bool = False
    """It is not placed yet, and must not take the nodes that its record names."""
    short_since: int | None = None

    @property
    def name(self) -> str:
        return f"{self.number:04}"

    @property
    def place(self) -> tuple[int, int]:
        """Its order in the queue."""
        return -self.priority, self.number

    @property
    def most(self) -> int:
        return self.limit or self.demand.nodes

    @property
    def is_endless(self) -> bool:
        return self.work > ENDLESS // 2

    @property
    def is_short(self) -> bool:
        return self.is_admitted and len(self.nodes) < self.demand.to_start

    @property
    def waits_for(self) -> str:
        """ "": it waits for nothing, or was not tried yet."""
        return self.record.waiting["resource"] if self.record.waiting else ""

    @property
    def is_waiting(self) -> bool:
        return not self.is_admitted and self.waits_for in KEEP_PLACE

    @property
    def off(self) -> set[str]:
        """Nodes that it cannot have, or not yet."""
        return {*self.unsuitable, *((self.record.kept_off or ()) if self.is_kept_off else ())}

    def has_its_place(self, now: int) -> None:
        self.short_since, self.is_kept_off = None, False
        if self.record.state != State.RUNNING:
            self.stored(now).transition(State.RUNNING)

    def stored(self, now: int) -> JobTransaction:
        """Changes its record as the reconciler does."""
        return JobTransaction(cast(AsyncSession, _NoDatabase()), self.record, float(now))


def fpgas_of(demand: NodeDemand) -> float:
    return dict(demand.custom).get("fpga", 0.0)
