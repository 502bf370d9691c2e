"""The codec of events: to JSON values and back.

`decode(kind, data)` ignores fields that this version does not know and fills in defaults for
missing ones. A kind that this version does not know becomes an `UnknownEvent` with the data as they
are. A document of a newer format is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast_service.job_model.events import attempts, checkpoints, health, incidents, progress
from holdfast_service.job_model.events.incidents import IncidentRecord
from holdfast_service.job_model.events.kinds import JobEvent
from holdfast_workers.protocol.codec import UnreadableDocument, as_json, restore
from holdfast_workers.protocol.messages import SupervisorEvent

FORMAT_VERSION = 1
"""The version of the journal's format. It grows only if older readers would misread a document;
further kinds and fields do not change it."""

EVENT_TYPES: Mapping[str, type[JobEvent]] = {
    event_type.kind: event_type
    for module in (attempts, checkpoints, health, incidents, progress)
    for event_type in vars(module).values()
    if isinstance(event_type, type)
    and issubclass(event_type, JobEvent)
    and "kind" in vars(event_type)
}
"""Every event of these modules, by its kind."""


@dataclass(frozen=True)
class UnknownEvent:
    """An event of a kind that this version does not know."""

    kind: str
    data: Mapping[str, Any]


AnyEvent = JobEvent | UnknownEvent


def encode(event: AnyEvent) -> dict[str, Any]:
    """The event's data as JSON values, without its kind."""
    if isinstance(event, UnknownEvent):
        return dict(event.data)
    data = as_json(event)
    if event.merged:
        data = {**data.pop(event.merged), **data}
    return {
        name: value
        for name, value in data.items()
        if value is not None or name not in event.omitted
    }


def decode(kind: str, data: Mapping[str, Any]) -> AnyEvent:
    """The event of these data. Raises UnreadableDocument if they do not fit the kind."""
    event_type = EVENT_TYPES.get(kind)
    if event_type is None:
        return UnknownEvent(kind, data)
    merged = {event_type.merged: data} if event_type.merged else {}
    return restore(event_type, {**data, **merged})


def numbered(seq: int, at: float, event: JobEvent) -> SupervisorEvent:
    """The event as its supervisor numbers it."""
    return SupervisorEvent(seq, at, event.kind.value, encode(event), FORMAT_VERSION)


def read_event(event: SupervisorEvent) -> AnyEvent:
    """Raises UnreadableDocument, also for an event of a newer format."""
    if event.format > FORMAT_VERSION:
        raise UnreadableDocument(
            f"event {event.seq} has format {event.format}, and this version of Holdfast reads up "
            f"to format {FORMAT_VERSION}: use the version that wrote it, or a later one"
        )
    return decode(event.kind, event.data)


def read_incident(number: int, data: Mapping[str, Any]) -> IncidentRecord:
    """An incident from the data in its row, which may be incomplete. Raises UnreadableDocument."""
    return restore(IncidentRecord, {"incident": number, **data})
