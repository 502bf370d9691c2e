"""Replay of the job's own events: the state that a restarted supervisor must know.

Only the events of the job are read. Replaying a closed incident again counts nothing twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from holdfast_service.job_model.supervisor_protocol import EventKind, StopOrder, SupervisorEvent
from holdfast_service.placement.restore_points import BadCopy, HistoryLine
from holdfast_service.policy.causes import Cause, ErrorMark, Offence
from holdfast_service.policy.checkpoint_intervals import AutoTier, needed_remote_tier
from holdfast_service.policy.incidents import Incident
from holdfast_workers.protocol.messages import Place
from holdfast_workers.training.skipped_windows import Ledger

T = TypeVar("T")


@dataclass
class Facts:
    """A summary of the journal, built by `Facts.from_events(all events, in order)`."""

    attempt: int = 0
    """The highest attempt that the journal shows as announced."""
    line: HistoryLine = field(default_factory=HistoryLine)
    ledger: Ledger = field(default_factory=Ledger)
    members: tuple[dict[str, Any], ...] = ()
    """Members of the last attempt formed, as listed in its event."""
    gone: frozenset[tuple[str, str]] = frozenset()
    """Agent incarnations that were known to have ended when the last attempt ended."""
    running: int = 0
    """The last attempt that committed its first step."""
    over: int = 0
    """The last attempt that ended; it must not be adopted."""
    committed: int = 0
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
    bad: frozenset[BadCopy] = frozenset()
    bad_uris: frozenset[str] = frozenset()
    saved: frozenset[str] = frozenset()
    waiting_until: float | None = None
    intervals: dict[AutoTier, int] = field(default_factory=dict)
    slow: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Slow ranks: rank → its last STRAGGLER event."""
    restores: int = 0
    remote_restores: int = 0
    stop: StopOrder | None = None
    ended: dict[str, Any] | None = None

    @classmethod
    def from_events(cls, events: Iterable[SupervisorEvent]) -> Facts:
        facts = cls()
        for event in events:
            facts._apply(event.kind, event.data)
        return facts

    def _apply(self, kind: EventKind, data: dict[str, Any]) -> None:
        match kind:
            case EventKind.ATTEMPT_FORMING:
                self._apply_forming(data)
            case EventKind.ATTEMPT_RUNNING:
                self.running = data["attempt"]
                self.line = self.line.with_run(data["attempt"])
                self.members = tuple(data["members"])
                self._apply_committed(data["first_step"])
            case EventKind.ATTEMPT_ENDED:
                self.over = data["attempt"]
                self.gone = frozenset(
                    (agent, incarnation) for agent, incarnation in data.get("gone", ())
                )
                self._apply_committed(max(self.committed, data["last_step"]))
            case EventKind.INCIDENT_OPENED | EventKind.INCIDENT_UPDATED | EventKind.INCIDENT_CLOSED:
                self._apply_incident(data)
            case EventKind.CHECKPOINT_SAVED:
                self.saved |= {data["uri"]}
            case EventKind.CHECKPOINT_BAD:
                self._apply_bad_checkpoint(data)
            case EventKind.MEMORY_PLACED:
                self.members = tuple(
                    {**member, "partners": data["partners"][str(member["rank"])]}
                    for member in self.members
                )
            case EventKind.GUARD_TRIPPED:
                self._apply_guard_trip(data)
            case EventKind.WAITING:
                self.waiting_until = data["until"]
            case EventKind.CHECKPOINT_INTERVAL | EventKind.STRAGGLER:
                self._apply_measurement(kind, data)
            case EventKind.JOB_STOPPING | EventKind.STOP_UNDONE | EventKind.ENDED:
                self._apply_ending(kind, data)
            case (
                EventKind.PHASE
                | EventKind.STALLED
                | EventKind.CHECKPOINT_DELETED
                | EventKind.INITIALISED_FROM
                | EventKind.STANDBY
                | EventKind.NODE_HEALTH
                | EventKind.NODE_DRAINING
                | EventKind.FAULT_FAILED
            ):
                pass

    def _apply_guard_trip(self, data: dict[str, Any]) -> None:
        self.ledger |= Ledger.of(data["ledger"])
        if data["back_to"] is not None:
            self.line = self.line.with_rollback(data["attempt"], data["back_to"])

    def _apply_measurement(self, kind: EventKind, data: dict[str, Any]) -> None:
        if kind is EventKind.CHECKPOINT_INTERVAL:
            self.intervals[AutoTier(data["tier"])] = data["every_steps"]
        elif data["state"] == "slow":
            self.slow[data["rank"]] = data
        else:
            self.slow.pop(data["rank"], None)

    def _apply_ending(self, kind: EventKind, data: dict[str, Any]) -> None:
        if kind is EventKind.ENDED:
            self.ended = data
        else:
            self.stop = StopOrder.from_data(data) if kind is EventKind.JOB_STOPPING else None

    def _apply_bad_checkpoint(self, data: dict[str, Any]) -> None:
        self.bad_uris |= {data["uri"]} - {""}
        if data.get("copy"):
            self.bad |= {_bad_copy(data["copy"])}
        if corrupt := data.get("corrupt"):
            self.line = self.line.with_rollback(corrupt["attempt"], corrupt["step"] - 1)

    def _apply_forming(self, data: dict[str, Any]) -> None:
        restore = data["restore"]
        if restore.get("attempt"):
            self.line = self.line.with_run(restore["attempt"])
        self.attempt = max(self.attempt, data["attempt"])
        if self.line.starts_elsewhere(restore["step"]):
            self.floor = restore["step"]
        self.line = self.line.with_attempt(data["attempt"], restore["step"])
        self.members = tuple(data["members"])
        self.waiting_until = None

    def _apply_committed(self, step: int) -> None:
        self.committed = step
        if step > self.floor:
            self.floor, self.without_progress = step, 0
        if self.mark is not None and step > self.mark.step:
            self.mark = None

    def _apply_incident(self, data: dict[str, Any]) -> None:
        incident = Incident.from_data(data)
        if incident.cause is Cause.REMOTE_UNAVAILABLE:
            self.incidents = max(self.incidents, incident.number)
            self.outage = incident if data.get("closed_at") is None else None
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
        self.bad |= {_bad_copy(copy) for copy in data.get("bad", ())}
        over = data.get("closed_at") is not None
        if over:
            self.restores += bool(incident.tiers)
            self.remote_restores += needed_remote_tier(incident.tiers.values())
        elif "without_progress" in incident.budget:
            self.without_progress = int(incident.budget["without_progress"])
        self.incident = None if over else incident


def _replace_tail(known: tuple[T, ...], before: tuple[T, ...], now: tuple[T, ...]) -> tuple[T, ...]:
    """`known` with its tail `before`, the entries of an open incident, replaced by `now`."""
    return (*known[: len(known) - len(before)], *now)


def _bad_copy(data: dict[str, Any]) -> BadCopy:
    return BadCopy(**{**data, "place": Place(data["place"])})
