"""What a restarted supervisor must know of the past, read back from the job's own events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from holdfast_service.job_model.supervisor_protocol import EventKind, Stopping, SupervisorEvent
from holdfast_service.placement.restore_points import BadCopy, Line
from holdfast_service.policy.causes import Cause, ErrorMark, Offence
from holdfast_service.policy.checkpoint_intervals import AutoTier, needed_remote
from holdfast_service.policy.incidents import Incident
from holdfast_workers.protocol.messages import Place
from holdfast_workers.training.skipped_windows import Ledger

T = TypeVar("T")


@dataclass
class Facts:
    """The journal in brief; `Facts.from_events(all events, in order)`."""

    attempt: int = 0
    """Highest attempt that the journal knows to have been announced."""
    line: Line = field(default_factory=Line)
    ledger: Ledger = field(default_factory=Ledger)
    members: tuple[dict[str, Any], ...] = ()
    """Members of the last attempt formed, as its event lists them."""
    gone: frozenset[tuple[str, str]] = frozenset()
    """Lives of agents that were known to have ended when the last attempt did."""
    running: int = 0
    """The last attempt that made its first step."""
    over: int = 0
    """The last attempt that ended: it must not be adopted."""
    committed: int = 0
    failures: tuple[float, ...] = ()
    """When attempts failed, for the budget; those of preemptions apart."""
    preemptions: tuple[float, ...] = ()
    offences: tuple[Offence, ...] = ()
    floor: int = 0
    without_progress: int = 0
    incidents: int = 0
    incident: Incident | None = None
    """The incident that was open."""
    outage: Incident | None = None
    """The same, of the remote tier."""
    mark: ErrorMark | None = None
    bad: frozenset[BadCopy] = frozenset()
    bad_uris: frozenset[str] = frozenset()
    saved: frozenset[str] = frozenset()
    waiting_until: float | None = None
    intervals: dict[AutoTier, int] = field(default_factory=dict)
    slow: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Rank → its event, of those that were slow."""
    restores: int = 0
    remote_restores: int = 0
    stop: Stopping | None = None
    ended: dict[str, Any] | None = None

    @classmethod
    def from_events(cls, events: Iterable[SupervisorEvent]) -> Facts:
        facts = cls()
        for event in events:
            facts._take(event.kind, event.data)
        return facts

    def _take(self, kind: EventKind, data: dict[str, Any]) -> None:
        match kind:
            case EventKind.ATTEMPT_FORMING:
                self._formed(data)
            case EventKind.ATTEMPT_RUNNING:
                self.running = data["attempt"]
                self.line = self.line.ran(data["attempt"])
                self.members = tuple(data["members"])
                self._committed(data["first_step"])
            case EventKind.ATTEMPT_ENDED:
                self.over = data["attempt"]
                self.gone = frozenset((agent, life) for agent, life in data.get("gone", ()))
                self._committed(max(self.committed, data["last_step"]))
            case EventKind.INCIDENT_OPENED | EventKind.INCIDENT_UPDATED | EventKind.INCIDENT_CLOSED:
                self._incident(data)
            case EventKind.CHECKPOINT_SAVED:
                self.saved |= {data["uri"]}
            case EventKind.CHECKPOINT_BAD:
                self._found_bad(data)
            case EventKind.MEMORY_PLACED:
                self.members = tuple(
                    {**one, "partners": data["partners"][str(one["rank"])]} for one in self.members
                )
            case EventKind.GUARD_TRIPPED:
                self._tripped(data)
            case EventKind.WAITING:
                self.waiting_until = data["until"]
            case EventKind.CHECKPOINT_INTERVAL | EventKind.STRAGGLER:
                self._measured(kind, data)
            case EventKind.JOB_STOPPING | EventKind.STOP_UNDONE | EventKind.ENDED:
                self._ending(kind, data)
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

    def _tripped(self, data: dict[str, Any]) -> None:
        self.ledger |= Ledger.of(data["ledger"])
        if data["back_to"] is not None:
            self.line = self.line.taken_back(data["attempt"], data["back_to"])

    def _measured(self, kind: EventKind, data: dict[str, Any]) -> None:
        if kind is EventKind.CHECKPOINT_INTERVAL:
            self.intervals[AutoTier(data["tier"])] = data["every_steps"]
        elif data["state"] == "slow":
            self.slow[data["rank"]] = data
        else:
            self.slow.pop(data["rank"], None)

    def _ending(self, kind: EventKind, data: dict[str, Any]) -> None:
        if kind is EventKind.ENDED:
            self.ended = data
        else:
            self.stop = Stopping.from_data(data) if kind is EventKind.JOB_STOPPING else None

    def _found_bad(self, data: dict[str, Any]) -> None:
        self.bad_uris |= {data["uri"]} - {""}
        if data.get("copy"):
            self.bad |= {_bad_copy(data["copy"])}
        if corrupt := data.get("corrupt"):
            self.line = self.line.taken_back(corrupt["attempt"], corrupt["step"] - 1)

    def _formed(self, data: dict[str, Any]) -> None:
        restore = data["restore"]
        if restore.get("attempt"):
            self.line = self.line.ran(restore["attempt"])
        self.attempt = max(self.attempt, data["attempt"])
        if self.line.begins_elsewhere(restore["step"]):
            self.floor = restore["step"]
        self.line = self.line.formed(data["attempt"], restore["step"])
        self.members = tuple(data["members"])
        self.waiting_until = None

    def _committed(self, step: int) -> None:
        self.committed = step
        if step > self.floor:
            self.floor, self.without_progress = step, 0
        if self.mark is not None and step > self.mark.step:
            self.mark = None

    def _incident(self, data: dict[str, Any]) -> None:
        incident = Incident.from_data(data)
        if incident.cause is Cause.REMOTE_UNAVAILABLE:
            self.incidents = max(self.incidents, incident.number)
            self.outage = incident if data.get("closed_at") is None else None
            return
        is_open = self.incident is not None and incident.number == self.incident.number
        if not is_open and incident.number <= self.incidents:
            return  # amended after its end: what it counts for is counted
        before = self.incident or replace(incident, failures=(), preemptions=(), offences=())
        self.failures = _grown(self.failures, before.failures, incident.failures)
        self.preemptions = _grown(self.preemptions, before.preemptions, incident.preemptions)
        self.offences = _grown(self.offences, before.offences, incident.offences)
        self.incidents = max(self.incidents, incident.number)
        self.attempt = max(self.attempt, incident.next_attempt)
        if incident.joined_attempt:
            self.line = self.line.ran(incident.joined_attempt)
        if incident.mark is not None:
            self.mark = incident.mark
        self.bad |= {_bad_copy(one) for one in data.get("bad", ())}
        over = data.get("closed_at") is not None
        if over:
            self.restores += bool(incident.tiers)
            self.remote_restores += needed_remote(incident.tiers.values())
        elif "without_progress" in incident.budget:
            self.without_progress = int(incident.budget["without_progress"])
        self.incident = None if over else incident


def _grown(known: tuple[T, ...], before: tuple[T, ...], now: tuple[T, ...]) -> tuple[T, ...]:
    """`known`, whose end is what an open incident held `before`, with what it holds `now`."""
    return (*known[: len(known) - len(before)], *now)


def _bad_copy(one: dict[str, Any]) -> BadCopy:
    return BadCopy(**{**one, "place": Place(one["place"])})
