"""Faults that users want of a job: kept with it, and brought to its supervisor, each once.

Refused unless the server allows it. A fault that is not told whom to meet meets a random rank,
which is chosen when it is stored: whatever crashes afterwards, it stays the same fault.
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

from holdfast_service.job_model.job_errors import (
    IdempotencyConflict,
    InjectionDisabled,
    InvalidFault,
    JobEnded,
)
from holdfast_service.job_model.supervisor_protocol import (
    Cluster,
    ClusterUnavailable,
    SupervisorUnavailable,
)
from holdfast_service.settings import Settings
from holdfast_service.store.engine import Store
from holdfast_service.store.job_lookup import canonical, find_job, not_found, spec_of
from holdfast_service.store.leases import Lease
from holdfast_service.store.models import InjectedFault
from holdfast_service.store.transaction import JobTransaction, NoSuchJob, job_transaction
from holdfast_service.views.jobs import FaultView
from holdfast_workers.fault_injection.kinds import Injection, Victim, faults_of

log = structlog.get_logger(__name__)


class InjectionService:
    """All calls raise JobNotFound for an id that was never given out."""

    def __init__(
        self,
        store: Store,
        settings: Settings,
        notify: Callable[[str], None] = lambda _job_id: None,
    ) -> None:
        """`notify(job_id)`: there is something to do for the job, for a reconciler in this
        process; others find out by themselves."""
        self._store = store
        self._allowed = settings.allow_fault_injection
        self._notify = notify

    async def inject(
        self, job_id: str, document: Mapping[str, Any], idempotency_key: str | None = None
    ) -> tuple[FaultView, bool]:
        """The fault, and True if this call made it; the same key and document: the first one.

        Raises InjectionDisabled, InvalidFault, IdempotencyConflict, JobEnded.
        """
        if not self._allowed:
            raise InjectionDisabled(
                "this server injects no faults: start it with --allow-fault-injection"
            )
        try:
            async with job_transaction(self._store, canonical(job_id)) as tx:
                first = await _made_before(tx, document, idempotency_key)
                if first is not None:
                    return _view(first), False
                row = _wanted(tx, document, idempotency_key)
                view = _view(row)
        except NoSuchJob as error:
            raise not_found(job_id) from error
        self._notify(job_id)
        return view, True

    async def list(self, job_id: str) -> Sequence[FaultView]:
        """Oldest first."""
        async with self._store.read() as session:
            await find_job(session, job_id)
            return [_view(row) for row in await _rows(session, job_id, after=0)]


async def deliver(store: Store, cluster: Cluster, lease: Lease, after: int) -> None:
    """Bring the faults with a number above `after` to the job's supervisor, in order.

    Each is told as often as it takes: the supervisor takes a number once. One that cannot be
    brought there now waits, with those after it, for the next call. Raises LeaseLost.
    """
    async with store.read() as session:
        rows = await _rows(session, lease.job_id, after)
    for row in rows:
        try:
            await cluster.inject(lease.job_id, row.number, row.fault)
        except (ClusterUnavailable, SupervisorUnavailable) as error:
            log.warning("fault.waits", job=lease.job_id, number=row.number, error=str(error))
            return
        async with job_transaction(store, lease.job_id, token=lease.token) as tx:
            if tx.state.terminal:
                return  # it ended before the fault could befall it
            stored = await tx.session.get_one(InjectedFault, (lease.job_id, row.number))
            stored.injected_at = tx.now
            tx.job.faults_injected = row.number
            tx.emit("fault.injected", {"number": row.number, **row.fault})


def _wanted(
    tx: JobTransaction, document: Mapping[str, Any], idempotency_key: str | None
) -> InjectedFault:
    """The new row. Raises InvalidFault, JobEnded, SpecUnreadable."""
    world_size = spec_of(tx.job).parallel.world_size
    wrong = faults_of(document, world_size)
    if wrong:
        raise InvalidFault(wrong)
    if tx.state.terminal:
        raise JobEnded(f"job {tx.job.id} has ended ({tx.state.lower()}) and stays so")
    fault = Injection.of(document).document()
    if Injection.of(fault).victim in (Victim.RANK, Victim.NODE) and "rank" not in fault:
        fault["rank"] = random.randrange(world_size)
    tx.job.faults_wanted += 1
    tx.job.due_at = 0.0  # whoever drives it looks at once
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


async def _made_before(
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
            f"idempotency key {idempotency_key!r} was used for fault {row.number}, another one"
        )
    return row


async def _rows(session: AsyncSession, job_id: str, after: int) -> Sequence[InjectedFault]:
    found = await session.scalars(
        select(InjectedFault)
        .where(InjectedFault.job_id == job_id, InjectedFault.number > after)
        .order_by(InjectedFault.number)
    )
    return found.all()


def _view(row: InjectedFault) -> FaultView:
    return FaultView(
        number=row.number,
        kind=row.fault["kind"],
        fault=row.fault,
        requested_at=row.requested_at,
        injected_at=row.injected_at,
    )


def _digest(document: Mapping[str, Any]) -> str:
    text = json.dumps(dict(document), sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
