"""Fault injection: stores the faults that users request for a job, and sends each one to the job's
supervisor, which carries it out once.

Requests are refused unless the server allows them. A fault without a target hits a random rank.
That rank is chosen when the fault is stored, so the fault stays the same after any crash.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import structlog
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_service.errors import (
    IdempotencyConflict,
    InjectionDisabled,
    InvalidFault,
    JobEnded,
)
from holdfast_service.job_model.events.health import FaultInjectedEvent
from holdfast_service.job_model.supervisor_protocol import (
    Cluster,
    ClusterUnavailable,
    SupervisorUnavailable,
)
from holdfast_service.services.job_commands import command_transaction
from holdfast_service.settings import Settings
from holdfast_service.store.engine import Store
from holdfast_service.store.job_lookup import find_job, spec_of
from holdfast_service.store.leases import RowLease
from holdfast_service.store.models import InjectedFault
from holdfast_service.store.transaction import JobTransaction, job_transaction
from holdfast_service.views.incidents import FaultView
from holdfast_service.views.pages import FaultPage, next_number
from holdfast_workers.fault_injection.kinds import Injection, injection_faults, program_faults

log = structlog.get_logger(__name__)


class InjectionService:
    """Calls raise JobNotFound for an id that belongs to no job."""

    def __init__(
        self,
        store: Store,
        settings: Settings,
        notify: Callable[[str], None] = lambda _job_id: None,
    ) -> None:
        """`notify(job_id)` reports new work for a job to the reconciler of this process; those of
        other processes find it by polling the store."""
        self._store = store
        self._allowed = settings.allow_fault_injection
        self._notify = notify

    async def inject(
        self, job_id: str, document: Mapping[str, Any], idempotency_key: str | None = None
    ) -> tuple[FaultView, bool]:
        """The fault, and True if this call created it; a repeated key and document return the
        first fault.

        Raises InjectionDisabled, InvalidFault, IdempotencyConflict, JobEnded.
        """
        if not self._allowed:
            raise InjectionDisabled(
                "fault injection is disabled on this server: start it with --allow-fault-injection"
            )
        async with command_transaction(self._store, job_id) as tx:
            first = await _find_by_key(tx, document, idempotency_key)
            if first is not None:
                return _view(first), False
            view = _view(_new_fault(tx, document, idempotency_key))
        self._notify(job_id)
        return view, True

    async def list(self, job_id: str, after: int = 0, limit: int = 1000) -> FaultPage:
        """The injected faults with a number above `after`."""
        async with self._store.read() as session:
            await find_job(session, job_id)
            found = await _rows(session, job_id, after, limit + 1)
        items = tuple(_view(row) for row in found[:limit])
        return FaultPage(items=items, next_cursor=next_number(found, limit))


async def deliver(store: Store, cluster: Cluster, lease: RowLease, after: int) -> None:
    """Send the faults with a number above `after` to the job's supervisor, in order.

    A fault may be sent repeatedly: the supervisor accepts a number once. If the supervisor cannot
    be reached, that fault and those after it wait for the next call. Raises LeaseLost.
    """
    async with store.read() as session:
        rows = await _rows(session, lease.id, after)
    for row in rows:
        try:
            await cluster.inject(lease.id, row.number, row.fault)
        except (ClusterUnavailable, SupervisorUnavailable) as error:
            log.warning("fault.waits", job=lease.id, number=row.number, error=str(error))
            return
        async with job_transaction(store, lease.id, token=lease.token) as tx:
            if tx.state.terminal:
                return  # the job ended before the fault was injected
            stored = await tx.session.get_one(InjectedFault, (lease.id, row.number))
            stored.injected_at = tx.now
            tx.job.faults_injected = row.number
            fault = Injection.of(row.fault)
            tx.emit(FaultInjectedEvent(number=row.number, fault=fault))


def _new_fault(
    tx: JobTransaction, document: Mapping[str, Any], idempotency_key: str | None
) -> InjectedFault:
    """Add a row to the session. Raises InvalidFault, JobEnded, SpecUnreadable."""
    spec = spec_of(tx.job)
    world_size = spec.parallel.world_size
    problems = injection_faults(document, world_size)
    if not problems and spec.brings_program:
        problems = program_faults(Injection.of(document))
    if problems:
        raise InvalidFault.of(problems)
    if tx.state.terminal:
        raise JobEnded(f"job {tx.job.id} has ended ({tx.state.lower()}): no fault can be injected")
    injection = Injection.of(document)
    fault = injection.document()
    if injection.kind.spec.has_rank:
        fault.setdefault("rank", random.randrange(world_size))
    tx.job.faults_wanted += 1
    tx.job.due_at = 0.0  # its reconciler acts at once
    row = InjectedFault(
        job_id=tx.job.id,
        number=tx.job.faults_wanted,
        fault=fault,
        idempotency_key=idempotency_key,
        request_digest=_digest(document),
        requested_at=tx.now,
        injected_at=None,
    )
    tx.session.add(row)
    return row


async def _find_by_key(
    tx: JobTransaction, document: Mapping[str, Any], idempotency_key: str | None
) -> InjectedFault | None:
    if idempotency_key is None:
        return None
    row = await tx.session.scalar(
        select(InjectedFault).where(
            InjectedFault.job_id == tx.job.id, InjectedFault.idempotency_key == idempotency_key
        )
    )
    if row is not None and row.request_digest != _digest(document):
        raise IdempotencyConflict(
            f"idempotency key {idempotency_key!r} was used for fault {row.number} with another "
            "document: use a new key"
        )
    return row


async def _rows(
    session: AsyncSession, job_id: str, after: int, limit: int | None = None
) -> Sequence[InjectedFault]:
    found = await session.scalars(
        select(InjectedFault)
        .where(InjectedFault.job_id == job_id, InjectedFault.number > after)
        .order_by(InjectedFault.number)
        .limit(limit)
    )
    return found.all()


def _view(row: InjectedFault) -> FaultView:
    return FaultView.from_attributes(row, kind=row.fault["kind"])


def _digest(document: Mapping[str, Any]) -> str:
    text = json.dumps(dict(document), sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
