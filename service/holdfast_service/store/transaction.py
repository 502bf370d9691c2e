"""One job's transaction: what changes a job, its events and their numbers, all or nothing.

The job's row is locked from the first statement, so numbers have no gaps and no twins, and the
state that a transition starts from is the state it replaces. A writer that drives the job gives
the token of its lease: once somebody else holds the job, none of its writes succeeds any more.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from enum import StrEnum
from typing import Any

from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_service.job_model.lifecycle import TERMINAL, State, require
from holdfast_service.job_model.webhook_messages import is_told, message
from holdfast_service.store.engine import Store
from holdfast_service.store.json_safe import text
from holdfast_service.store.models import AttemptMember, Event, Intent, Job, Outbox

INCIDENT_CLOSED = "incident.closed"


class Effect(StrEnum):
    """What is brought about on the cluster for a job; the names of its intents."""

    START = "start"
    CANCEL = "cancel"
    CANCEL_NOW = "cancel.now"  # without a last checkpoint
    PAUSE = "pause"
    RELEASE = "release"


class LeaseLost(Exception):
    """Another reconciler drives the job by now; the writer must let go of it."""


class NoSuchJob(Exception):
    """No job has this id."""


class JobTransaction:
    """A job, locked, for the length of a transaction. Made by :func:`job_transaction`."""

    def __init__(self, session: AsyncSession, job: Job, now: float, *, tells: bool = False) -> None:
        """`tells`: somebody is to hear of incidents and ends; see webhooks.py."""
        self._tells = tells
        self.session = session
        self.job = job
        self.now = now
        self.transitions: list[tuple[str, str, str]] = []
        """(from, to, code of the outcome or "")."""
        self.closed_incidents: list[dict[str, Any]] = []
        self.checkpoints: list[tuple[str, str, float]] = []
        """(tier, operation, seconds)."""
        self.seats: dict[int, dict[int, AttemptMember]] = {}
        """Attempt -> rank -> who has it, of those attempts that were looked at."""

    @property
    def state(self) -> State:
        return State(self.job.state)

    def emit(self, kind: str, data: dict[str, Any], at: float | None = None) -> int:
        """Append an event to the job's history; returns its number."""
        self.job.event_seq += 1
        if kind == INCIDENT_CLOSED:
            self.closed_incidents.append(data)
        self.session.add(
            Event(
                job_id=self.job.id,
                seq=self.job.event_seq,
                at=self.now if at is None else at,
                kind=text(kind)[:64],
                data=data,
            )
        )
        if self._tells and is_told(kind, data):
            self._tell(kind, data, self.now if at is None else at)
        return self.job.event_seq

    def _tell(self, kind: str, data: dict[str, Any], at: float) -> None:
        told = message(self.job.id, self.job.name, self.job.event_seq, at, kind, data)
        self.session.add(Outbox(id=told["id"], at=at, message=told, due_at=0.0, tries=0))

    def told(self) -> tuple[int, int, int]:
        """How much this transaction has to tell once it is stored; see `tell_again_from`."""
        return len(self.transitions), len(self.closed_incidents), len(self.checkpoints)

    def tell_again_from(self, told: tuple[int, int, int]) -> None:
        """What came after that was rolled back, to a savepoint."""
        self.seats.clear()
        del self.transitions[told[0] :]
        del self.closed_incidents[told[1] :]
        del self.checkpoints[told[2] :]

    def transition(self, new: State, *, reason: str | None = None, at: float | None = None) -> None:
        """Move the job to `new`, with its event. Raises ForbiddenTransition."""
        old = self.state
        require(old, new)
        self.job.state = new
        when = self.now if at is None else at
        if new is State.STARTING and self.job.started_at is None:
            self.job.started_at = when
        if new in TERMINAL:
            self.job.ended_at = when
        self.job.waiting = None
        self._note_hold(new, when)
        self.emit("job.state", {"from": old, "to": new, "reason": reason}, at=when)
        code = (self.job.outcome_code or "") if new in TERMINAL else ""
        self.transitions.append((old.value, new.value, code))

    def count_goodput(self) -> None:
        """As lists show it: time in steps that are part of history over time on the cluster."""
        job = self.job
        held_s = job.held_s
        if job.held_since is not None:
            held_s += max(0.0, self.now - job.held_since)
        if job.productive_s is not None and held_s > 0:
            job.goodput = min(1.0, job.productive_s / held_s)

    def _note_hold(self, new: State, when: float) -> None:
        job = self.job
        if new.on_cluster and job.held_since is None:
            job.held_since = when
        elif not new.on_cluster and job.held_since is not None:
            job.held_s += max(0.0, when - job.held_since)
            job.held_since = None
            self.count_goodput()

    def end(
        self,
        outcome: State,
        code: str,
        message: str,
        traceback: str | None = None,
        at: float | None = None,
    ) -> None:
        """Move the job to a terminal state, with the cause that users see."""
        self.job.outcome_code = text(code)[:64]
        self.job.outcome_message = text(message)
        self.job.outcome_traceback = None if traceback is None else text(traceback)
        self.transition(outcome, reason=self.job.outcome_message, at=at)

    def wait_for(
        self, resource: str, reason: str, *, until: float | None = None, event: str = "waiting"
    ) -> None:
        """Say what the job waits for; an event only when it did not wait for that before."""
        known = self.job.waiting
        same = known is not None and known["resource"] == resource
        self.job.waiting = {
            "resource": resource,
            "reason": text(reason),
            "since": known["since"] if known and same else self.now,
            "until": until,
        }
        if not same:
            self.emit(event, {"resource": resource, "reason": reason, "until": until})

    def waits_no_more(self, *resources: str) -> None:
        """Forget a wait for one of `resources`, if that is what the job waited for."""
        if self.job.waiting and self.job.waiting["resource"] in resources:
            self.job.waiting = None

    async def intend(self, name: Effect, known: Mapping[str, Intent] | None = None) -> Intent:
        """Write down that an effect is about to be asked for; the first time counts. `known`: all
        intents, as the holder of the lease, who alone has them, knows them."""
        intent = await self._intent(name, known)
        if intent is None:
            intent = Intent(job_id=self.job.id, name=name, at=self.now, done_at=None, times=0)
            self.session.add(intent)
        return intent

    async def done(self, name: Effect, known: Mapping[str, Intent] | None = None) -> Intent:
        """Write down that the effect is there, and count it."""
        intent = await self.intend(name, known)
        intent.done_at = self.now
        intent.times += 1
        return intent

    async def _intent(self, name: Effect, known: Mapping[str, Intent] | None) -> Intent | None:
        if known is None:
            return await self.session.get(Intent, (self.job.id, name))
        if name in known:
            # Not read again; what a transaction before this one has left undone is not in it.
            return await self.session.merge(known[name], load=False)
        return None

    async def forget(self, *names: Effect) -> None:
        """Forget intents: what they brought about is undone, and may be intended anew."""
        await self.session.execute(
            delete(Intent).where(Intent.job_id == self.job.id, Intent.name.in_(names))
        )


@asynccontextmanager
async def job_transaction(
    store: Store, job_id: str, *, token: str | None = None, now: float | None = None
) -> AsyncIterator[JobTransaction]:
    """Lock the job and change it; committed at the end of the block, rolled back if it raises.

    Raises NoSuchJob, and LeaseLost if `token` is not the job's.
    """
    async with store.write() as session:
        job = await session.scalar(select(Job).where(Job.id == job_id).with_for_update())
        if job is None:
            raise NoSuchJob(job_id)
        if token is not None and job.lease_token != token:
            raise LeaseLost(job_id)
        transaction = JobTransaction(
            session, job, time.time() if now is None else now, tells=store.tells
        )
        yield transaction
    store.transitions.update(transaction.transitions)
    for tier, operation, seconds in transaction.checkpoints:
        store.checkpoints[tier, operation].add(seconds)
    for told in transaction.closed_incidents:
        store.on_incident_closed(job_id, told)
