"""Job transactions: change a job, append its events and number them, atomically.

The job's row is locked from the first statement, so event numbers have no gaps or duplicates, and a
transition replaces exactly the state that it started from. A reconciler passes the token of its
lease: once another reconciler holds the job, all writes with the old token fail.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from enum import StrEnum
from typing import Any

from sqlalchemy import delete
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_service.job_model.admission import Reservation
from holdfast_service.job_model.events.codec import AnyEvent, encode
from holdfast_service.job_model.events.incidents import IncidentClosedEvent
from holdfast_service.job_model.events.progress import (
    JobAwayEvent,
    JobStateEvent,
    WaitEvent,
    WaitingEvent,
)
from holdfast_service.job_model.lifecycle import (
    TERMINAL,
    Desired,
    Phase,
    State,
    require,
    state_after_report,
)
from holdfast_service.job_model.program_levels import has_goodput
from holdfast_service.job_model.supervisor_protocol import GrowthRequest
from holdfast_service.store import leases
from holdfast_service.store.engine import Store
from holdfast_service.store.json_safe import text
from holdfast_service.store.models import Event, Intent, JobRecord, Outbox
from holdfast_service.views.webhook_messages import is_sent, message


class Effect(StrEnum):
    """An effect outside of the database on behalf of a job; the values name its intents."""

    START = "start"
    CANCEL = "cancel"
    CANCEL_NOW = "cancel.now"  # without a last checkpoint
    PAUSE = "pause"
    RELEASE = "release"
    REMOVE_CHECKPOINTS = "remove.checkpoints"  # and then the job; see services/job_removal.py
    RESTORED = "restored"  # set by `holdfast restore` until the cluster was asked about the job


class NoSuchJob(Exception):
    """No job has this id."""


class JobTransaction:
    """A locked job during one transaction. Created by :func:`job_transaction`."""

    def __init__(
        self, session: AsyncSession, job: JobRecord, now: float, *, sends_webhooks: bool = False
    ) -> None:
        """`sends_webhooks`: queue webhook messages for incidents and job ends; see
        reconcile/webhook_sender.py."""
        self._sends_webhooks = sends_webhooks
        self.session = session
        self.job = job
        self.now = now
        self.was_away = False
        """Whether this transaction records an absence of the job."""
        self.effects: list[Callable[[Store], None]] = []
        """What else this process does once the transaction is committed. To discard a savepoint,
        discard also what was added since."""

    @property
    def state(self) -> State:
        return State(self.job.state)

    def emit(
        self, event: AnyEvent, at: float | None = None, data: dict[str, Any] | None = None
    ) -> int:
        """Append an event to the job's history; returns its number. `data`: the event as it was
        received, which may have fields that this version does not know."""
        when = self.now if at is None else at
        self.job.event_seq += 1
        self.session.add(
            Event(
                job_id=self.job.id,
                seq=self.job.event_seq,
                at=when,
                kind=text(event.kind)[:64],
                data=encode(event) if data is None else data,
            )
        )
        if isinstance(event, IncidentClosedEvent):
            incident = event.record
            self.effects.append(lambda store: store.on_incident_closed(self.job.id, incident))
        if self._sends_webhooks and is_sent(event):
            queued = message(self.job.id, self.job.name, self.job.event_seq, when, event)
            self.session.add(Outbox(id=queued["id"], at=when, message=queued, due_at=0.0, tries=0))
        return self.job.event_seq

    def transition(self, new: State, *, reason: str | None = None, at: float | None = None) -> None:
        """Move the job to `new`, with its event. Raises ForbiddenTransition."""
        old = self.state
        require(old, new)
        self.job.state = new
        when = self.now if at is None else at
        if new is State.RUNNING or (new is State.PAUSED and self.job.desired == Desired.PAUSED):
            self.job.queued_at = 0.0  # its age in the queue is over
        if new is State.QUEUED and not self.job.queued_at:
            self.job.queued_at = when
        if new is State.STARTING and self.job.started_at is None:
            self.job.started_at = when
        if new in TERMINAL:
            self.job.ended_at = when
        self.job.waiting = None
        self._update_held_time(new, when)
        self.emit(JobStateEvent(old=old, new=new, reason=reason), at=when)
        code = (self.job.outcome_code or "") if new in TERMINAL else ""
        change = old.value, new.value, code
        self.effects.append(lambda store: store.transitions.update([change]))

    def enter(self, phase: Phase, at: float | None = None) -> None:
        """Move the job to the state that corresponds to its supervisor's phase, if that may be."""
        new = state_after_report(self.state, phase)
        if new is not None:
            self.transition(new, at=at)

    def measured(self, tier: str, operation: str, seconds: float) -> None:
        """Report the duration of a checkpoint operation."""
        self.effects.append(lambda store: store.checkpoints[tier, operation].add(seconds))

    def update_goodput(self) -> None:
        """Update the goodput shown in lists: productive time over time on the cluster."""
        job = self.job
        if not has_goodput(job.spec, job.cursor_attempt):
            return
        held_s = job.held_s
        if job.held_since is not None:
            held_s += max(0.0, self.now - job.held_since)
        if held_s > 0:
            job.goodput = min(1.0, job.productive_s / held_s)

    def record_absence(self, event: JobAwayEvent, at: float) -> None:
        """Count no time on the cluster for an absence up to `at`."""
        self.was_away, since = True, self.job.held_since
        if since is not None:
            self.job.held_s += max(0.0, at - event.away_s - since)
            self.job.held_since = max(at, since)

    def _update_held_time(self, new: State, when: float) -> None:
        job = self.job
        if new.on_cluster and job.held_since is None:
            job.held_since = when
        elif not new.on_cluster and job.held_since is not None:
            job.held_s += max(0.0, when - job.held_since)
            job.held_since = None
            self.update_goodput()

    def end(
        self,
        outcome: State,
        code: str,
        message: str,
        traceback: str | None = None,
        at: float | None = None,
    ) -> None:
        """Move the job to a terminal state, with the reason that users see."""
        self.job.outcome_code = text(code)[:64]
        self.job.outcome_message = text(message)
        self.job.outcome_traceback = None if traceback is None else text(traceback)
        self.transition(outcome, reason=self.job.outcome_message, at=at)

    def wait_for(
        self,
        resource: str,
        reason: str,
        *,
        until: float | None = None,
        reserved: Reservation | None = None,
        asked: GrowthRequest | None = None,
        event: type[WaitEvent] | None = WaitingEvent,
    ) -> None:
        """Store what the job waits for; emits an event, if any, only if the resource has
        changed."""
        known = self.job.waiting
        same = known is not None and known["resource"] == resource
        self.job.waiting = {
            "resource": resource,
            "reason": text(reason),
            "since": known["since"] if known and same else self.now,
            "until": until,
            "reserved": None if reserved is None else asdict(reserved),
            "asked": None if asked is None else self._asked(asked),
        }
        if event is not None and not same:
            self.emit(event(resource=resource, reason=reason, until=until))

    def _asked(self, request: GrowthRequest) -> dict[str, Any]:
        known = (self.job.waiting or {}).get("asked")
        return {
            "nodes": request.new,
            "cpus": request.bundle.get("CPU", 0.0),
            "gpus": request.bundle.get("GPU", 0.0),
            "since": known["since"] if known else self.now,
        }

    def clear_wait(self, *resources: str) -> None:
        """Clear the job's wait if it waits for one of `resources`."""
        if self.job.waiting and self.job.waiting["resource"] in resources:
            self.job.waiting = None

    async def record_intent(
        self, name: Effect, known: Mapping[str, Intent] | None = None
    ) -> Intent:
        """Record that an effect is about to be requested; only the first call has an effect.
        `known`: all intents of the job, as known to the lease holder, their only writer."""
        intent = await self._find_intent(name, known)
        if intent is None:
            intent = Intent(job_id=self.job.id, name=name, at=self.now, done_at=None, times=0)
            self.session.add(intent)
        return intent

    async def record_done(self, name: Effect, known: Mapping[str, Intent] | None = None) -> Intent:
        """Record that the effect took place, and count it."""
        intent = await self.record_intent(name, known)
        intent.done_at = self.now
        intent.times += 1
        return intent

    async def _find_intent(self, name: Effect, known: Mapping[str, Intent] | None) -> Intent | None:
        if known is None:
            return await self.session.get(Intent, (self.job.id, name))
        if name in known:
            # No second read: `known` holds no uncommitted change of an earlier transaction.
            return await self.session.merge(known[name], load=False)
        return None

    async def forget_intents(self, *names: Effect) -> None:
        """Delete intents whose effects were undone, so that they can be recorded again."""
        await self.session.execute(
            delete(Intent).where(Intent.job_id == self.job.id, Intent.name.in_(names))
        )


@asynccontextmanager
async def job_transaction(
    store: Store, job_id: str, *, token: str | None = None, now: float | None = None
) -> AsyncIterator[JobTransaction]:
    """Lock the job for changes; commits at the end of the block and rolls back if it raises.

    Raises NoSuchJob, and LeaseLost if `token` is not the job's.
    """
    async with store.write() as session:
        job = await leases.lock(session, JobRecord, job_id, token)
        if job is None:
            raise NoSuchJob(job_id)
        transaction = JobTransaction(
            session, job, time.time() if now is None else now, sends_webhooks=store.sends_webhooks
        )
        yield transaction
    for on_job_stored in store.on_job_stored:
        on_job_stored(transaction.job)
    for effect in transaction.effects:
        effect(store)
