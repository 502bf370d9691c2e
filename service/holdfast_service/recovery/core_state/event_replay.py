"""Replay of the job's own events: the state that a restarted supervisor must know.

Only the events of the job are read. Replaying a closed incident again counts nothing twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from holdfast_service.job_model.events.attempts import (
    AttemptEndedEvent,
    AttemptFormingEvent,
    AttemptRunningEvent,
    MemoryPlacedEvent,
    ProgramAttachedEvent,
    ProgramResumedEvent,
    SeatedRank,
)
from holdfast_service.job_model.events.checkpoints import (
    CheckpointBadEvent,
    CheckpointIntervalEvent,
    CheckpointSavedEvent,
)
from holdfast_service.job_model.events.codec import AnyEvent, read_event
from holdfast_service.job_model.events.health import GuardTrippedEvent, StragglerEvent
from holdfast_service.job_model.events.incidents import IncidentEvent, IncidentRecord
from holdfast_service.job_model.events.progress import (
    EndedEvent,
    EndsEarlyEvent,
    JobStoppingEvent,
    StopUndoneEvent,
    WaitingEvent,
)
from holdfast_service.job_model.lifecycle import StopOrder
from holdfast_service.job_model.supervisor_protocol import SupervisorEvent
from holdfast_service.placement.restore_points import BadCopy, HistoryLine
from holdfast_service.policy.causes import Cause, ErrorMark, Offence
from holdfast_service.policy.checkpoint_intervals import AutoTier, needed_remote_tier
from holdfast_service.policy.incidents import Incident
from holdfast_workers.training.skipped_windows import Ledger

T = TypeVar("T")


@dataclass
class Facts:
    """A summary of the journal, built by `Facts.from_events(all events, in order)`."""

    attempt: int = 0
    """The highest attempt that the journal shows as announced."""
    meshes: dict[int, Mapping[str, int]] = field(default_factory=dict)
    """Attempt that was formed → its mesh."""
    speeds: dict[int, float] = field(default_factory=dict)
    """Attempt → the tokens per second that it measured on its mesh."""
    line: HistoryLine = field(default_factory=HistoryLine)
    ledger: Ledger = field(default_factory=Ledger)
    members: tuple[SeatedRank, ...] = ()
    """Members of the last attempt formed, as listed in its event."""
    gone: frozenset[tuple[str, str]] = frozenset()
    """Agent incarnations that were known to have ended when the last attempt ended."""
    running: int = 0
    """The last attempt that committed its first step."""
    over: int = 0
    """The last attempt that ended; it must not be adopted."""
    committed: int = 0
    has_step: bool = False
    """Whether any step is known to be committed."""
    failures: tuple[float, ...] = ()
    """When attempts failed, for the budget; preemptions are counted separately."""
    preemptions: tuple[float, ...] = ()
    offences: tuple[Offence, ...] = ()
    floor: int = 0
    without_progress: int = 0
    incidents: int = 0
    incident: Incident | None = None
    """The open incident, if any."""
    outage: Incident | None = None
    """The open incident of the remote tier, if any."""
    mark: ErrorMark | None = None
    program_level: int = 0
    reports_steps: bool = False
    """Whether the user's program has reported a step."""
    bad: frozenset[BadCopy] = frozenset()
    bad_uris: frozenset[str] = frozenset()
    saved: frozenset[str] = frozenset()
    waiting_until: float | None = None
    intervals: dict[AutoTier, int] = field(default_factory=dict)
    slow: dict[int, StragglerEvent] = field(default_factory=dict)
    """Slow ranks: rank → its last event."""
    restores: int = 0
    remote_restores: int = 0
    stop: StopOrder | None = None
    early: EndsEarlyEvent | None = None
    ended: EndedEvent | None = None

    @classmethod
    def from_events(cls, events: Iterable[SupervisorEvent]) -> Facts:
        """Raises UnreadableEvent: a supervisor must not act on half of its history."""
        facts = cls()
        for event in events:
            facts._apply(read_event(event))
        return facts

    def _apply(self, event: AnyEvent) -> None:
        match event:
            case AttemptFormingEvent():
                self._apply_forming(event)
            case AttemptRunningEvent():
                self.running = event.attempt
                self.line = self.line.with_run(event.attempt)
                self.members = event.members
                self.reports_steps |= event.first_step is not None
                self._apply_committed(event.first_step)
            case AttemptEndedEvent():
                self.over = event.attempt
                self.gone = frozenset(event.gone)
                if event.tokens_per_s is not None:
                    self.speeds[event.attempt] = event.tokens_per_s
                self.reports_steps |= event.last_step is not None
                self._apply_committed(event.last_step, at_least=self.committed)
            case IncidentEvent():
                self._apply_incident(event.record)
            case CheckpointBadEvent():
                self._apply_bad_checkpoint(event)
            case MemoryPlacedEvent():
                self._apply_partners(event.protection.partners)
            case GuardTrippedEvent():
                self._apply_guard_trip(event)
            case CheckpointSavedEvent():
                self.saved |= {event.uri}
            case CheckpointIntervalEvent():
                self.intervals[event.choice.tier] = event.choice.every_steps
            case StragglerEvent():
                self._apply_straggler(event)
            case _:
                self._apply_to_job(event)

    def _apply_to_job(self, event: AnyEvent) -> None:
        """Apply what a program shows, a wait, a stop or the end; a supervisor need know no other
        kind."""
        match event:
            case ProgramAttachedEvent(level=level):
                self.program_level = max(self.program_level, level)
            case ProgramResumedEvent():
                self.reports_steps = True
            case WaitingEvent():
                self.waiting_until = event.until
            case JobStoppingEvent():
                self.stop = event.order
            case StopUndoneEvent():
                self.stop = None
            case EndsEarlyEvent():
                self.early = event
            case EndedEvent():
                self.ended = event

    def _apply_partners(self, partners: Mapping[int, tuple[str, ...]]) -> None:
        self.members = tuple(
            replace(member, partners=partners[member.rank]) for member in self.members
        )

    def _apply_guard_trip(self, event: GuardTrippedEvent) -> None:
        self.ledger |= Ledger.of(event.ledger)
        if event.trip.back_to is not None:
            self.line = self.line.with_rollback(event.attempt, event.trip.back_to)

    def _apply_straggler(self, event: StragglerEvent) -> None:
        self.slow.pop(event.rank, None)
        if event.state == "slow":
            self.slow[event.rank] = event

    def _apply_bad_checkpoint(self, event: CheckpointBadEvent) -> None:
        self.bad_uris |= {event.uri} - {""}
        if event.copy is not None:
            self.bad |= {event.copy}
        if event.corrupt is not None:
            self.line = self.line.with_rollback(event.corrupt.attempt, event.corrupt.step - 1)

    def _apply_forming(self, event: AttemptFormingEvent) -> None:
        restore = event.restore
        if restore.attempt:
            self.line = self.line.with_run(restore.attempt)
        self.attempt = max(self.attempt, event.attempt)
        self.meshes[event.attempt] = event.mesh
        if self.line.starts_elsewhere(restore.step):
            self.floor = restore.step
        self.line = self.line.with_attempt(event.attempt, restore.step)
        self.members = event.members
        if self.early is not None and restore.step < self.early.step:
            self.early = None
        self.waiting_until = None

    def _apply_committed(self, step: int | None, at_least: int = 0) -> None:
        if step is None:
            return
        step = max(step, at_least)
        self.committed, self.has_step = step, True
        if step > self.floor:
            self.floor, self.without_progress = step, 0
        if self.mark is not None and step > self.mark.newest:
            self.mark = None

    def _apply_incident(self, record: IncidentRecord) -> None:
        incident, over = record.restored(), record.closed_at is not None
        if incident.cause is Cause.REMOTE_UNAVAILABLE:
            self.incidents = max(self.incidents, incident.number)
            self.outage = None if over else incident
            return
        is_open = self.incident is not None and incident.number == self.incident.number
        if not is_open and incident.number <= self.incidents:
            return  # an amendment after its end: the incident was already counted
        before = self.incident or replace(incident, failures=(), preemptions=(), offences=())
        self.failures = _replace_tail(self.failures, before.failures, incident.failures)
        self.preemptions = _replace_tail(self.preemptions, before.preemptions, incident.preemptions)
        self.offences = _replace_tail(self.offences, before.offences, incident.offences)
        self.incidents = max(self.incidents, incident.number)
        self.attempt = max(self.attempt, incident.next_attempt)
        if incident.joined_attempt:
            self.line = self.line.with_run(incident.joined_attempt)
        if incident.mark is not None:
            self.mark = incident.mark
        self.bad |= set(incident.bad)
        if over:
            self.restores += bool(incident.tiers)
            self.remote_restores += needed_remote_tier(incident.tiers.values())
        elif incident.budget is not None:
            self.without_progress = incident.budget.without_progress
        self.incident = None if over else incident


def _replace_tail(known: tuple[T, ...], before: tuple[T, ...], now: tuple[T, ...]) -> tuple[T, ...]:
    """`known` with its tail `before`, the entries of an open incident, replaced by `now`."""
    return (*known[: len(known) - len(before)], *now)
