"""What a restarted supervisor must know of the past, read back from the job's own events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from holdfast_service.incidents import Incident
from holdfast_service.policy import ErrorMark
from holdfast_service.registry import BadCopy, Line
from holdfast_service.reports import EventKind, SupervisorEvent
from holdfast_workers.messages import Place


@dataclass
class Facts:
    """The journal in brief; `Facts.from_events(all events, in order)`."""

    attempt: int = 0
    """Highest attempt that the journal knows to have been announced."""
    line: Line = field(default_factory=Line)
    members: tuple[dict[str, Any], ...] = ()
    """Members of the last attempt formed, as its event lists them."""
    running: int = 0
    """The last attempt that made its first step."""
    over: int = 0
    """The last attempt that ended: it must not be adopted."""
    committed: int = 0
    failures: tuple[float, ...] = ()
    """When attempts failed, for the budget."""
    incidents: int = 0
    incident: Incident | None = None
    """The incident that was open."""
    mark: ErrorMark | None = None
    bad: frozenset[BadCopy] = frozenset()
    bad_uris: frozenset[str] = frozenset()
    saved: frozenset[str] = frozenset()
    waiting_until: float | None = None
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
                self._committed(max(self.committed, data["last_step"]))
            case EventKind.INCIDENT_OPENED | EventKind.INCIDENT_UPDATED | EventKind.INCIDENT_CLOSED:
                self._incident(data)
                if data.get("closed_at") is not None:  # amended after its end, it stays closed
                    self.incident = None
            case EventKind.CHECKPOINT_SAVED:
                self.saved |= {data["uri"]}
            case EventKind.CHECKPOINT_BAD:
                self.bad_uris |= {data["uri"]} - {""}
            case EventKind.WAITING:
                self.waiting_until = data["until"]
            case EventKind.ENDED:
                self.ended = data
            case EventKind.PHASE | EventKind.CHECKPOINT_DELETED | EventKind.STANDBY:
                pass

    def _formed(self, data: dict[str, Any]) -> None:
        restore = data["restore"]
        if restore.get("attempt"):
            self.line = self.line.ran(restore["attempt"])
        self.attempt = max(self.attempt, data["attempt"])
        self.line = self.line.formed(data["attempt"], restore["step"])
        self.members = tuple(data["members"])
        self.waiting_until = None

    def _committed(self, step: int) -> None:
        self.committed = step
        if self.mark is not None and step > self.mark.step:
            self.mark = None

    def _incident(self, data: dict[str, Any]) -> None:
        incident = Incident.from_data(data)
        before = self.failures[: -len(self.incident.failures) or None] if self.incident else ()
        self.failures = (*(before if self.incident else self.failures), *incident.failures)
        self.incidents = max(self.incidents, incident.number)
        self.attempt = max(self.attempt, incident.next_attempt)
        if incident.joined_attempt:
            self.line = self.line.ran(incident.joined_attempt)
        if incident.mark is not None:
            self.mark = incident.mark
        self.bad |= {_bad_copy(one) for one in data.get("bad", ())}
        self.incident = incident


def _bad_copy(one: dict[str, Any]) -> BadCopy:
    return BadCopy(**{**one, "place": Place(one["place"])})
