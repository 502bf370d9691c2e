"""The supervisor's numbered events: appended by one thread, read by others.

Agents back up the events for the next supervisor, whose own numbers are higher than all of this
one's: what it does not find at the agents stays in the store, and no number is used twice. The log
holds every event that is not stored yet, and of the stored events as many as the agents keep.
"""

from __future__ import annotations

import bisect
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from holdfast_service.job_model.events import codec
from holdfast_service.job_model.events.kinds import JobEvent
from holdfast_service.job_model.supervisor_protocol import first_event
from holdfast_workers.agent.run_journal import KEPT_EVENTS
from holdfast_workers.protocol.messages import SupervisorEvent


class EventLog:
    """Numbers are higher than `last_stored`. `on_events()` is called after there are new ones."""

    def __init__(self, last_stored: int = 0, on_events: Callable[[], None] = lambda: None) -> None:
        self._on_events = on_events
        self._lock = threading.Lock()
        self._events: list[SupervisorEvent] = []
        self._last_used = last_stored
        self._next = first_event(0, last_stored)
        self._backed_up_to: dict[tuple[str, str], int] = {}
        self.acked = last_stored

    def adopt(self, events: Iterable[SupervisorEvent], epoch: int) -> None:
        """Take over the events of an earlier supervisor, in order; the next event will be the first
        of `epoch`."""
        with self._lock:
            self._events = list(events)
            last_used = max([self._last_used, *(event.seq for event in self._events[-1:])])
            self._next = first_event(epoch, last_used)
        self._on_events()

    def append(self, event: JobEvent) -> None:
        with self._lock:
            self._events.append(codec.numbered(self._next, time.time(), event))
            self._next += 1
        self._on_events()

    def has_after(self, number: int) -> bool:
        with self._lock:
            return bool(self._events) and self._events[-1].seq > number

    def after(self, number: int) -> tuple[SupervisorEvent, ...]:
        """Events after `number`, which the reconciler has stored."""
        with self._lock:
            self.acked = max(self.acked, number)
            stored = bisect.bisect_right(self._events, self.acked, key=_number)
            del self._events[: max(0, stored - KEPT_EVENTS)]
            return tuple(self._events_after(number))

    def not_backed_up_by(self, agent: str, incarnation: str) -> tuple[SupervisorEvent, ...]:
        """Events that this agent has not received yet."""
        with self._lock:
            after = self._backed_up_to.get((agent, incarnation), 0)
            return tuple(self._events_after(after))

    def mark_backed_up(
        self, agent: str, incarnation: str, events: Sequence[SupervisorEvent]
    ) -> None:
        if events:
            with self._lock:
                self._backed_up_to[(agent, incarnation)] = events[-1].seq

    def _events_after(self, number: int) -> list[SupervisorEvent]:
        return self._events[bisect.bisect_right(self._events, number, key=_number) :]


def _number(event: SupervisorEvent) -> int:
    return event.seq
