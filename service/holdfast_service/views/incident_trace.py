"""Converts an incident to a trace: a span for the incident, and a child span per phase. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from holdfast_service.job_model.events.incidents import IncidentRecord

PHASES = ("detect", "gather", "fence", "decide", "wait", "form", "restore", "first_step")
"""Phases in the order of a recovery; other phases of an incident come last."""


@dataclass(frozen=True)
class TraceSpan:
    """A span of a trace. Times are Unix seconds."""

    name: str
    begins: float
    ends: float
    attributes: Mapping[str, str | int | float]


def spans(job_id: str, incident: IncidentRecord) -> list[TraceSpan]:
    """The spans of a closed incident; the span of the incident is first. Raises ValueError if a
    time is not finite."""
    ends = incident.closed_at or incident.opened_at or 0.0
    begins = incident.signalled_at or incident.opened_at or ends
    known = {name: taken_s for name, taken_s in incident.phases_s.items() if name != "total"}
    if not all(map(math.isfinite, (begins, ends, *known.values()))):
        raise ValueError(f"incident {incident.incident} has times that are not finite")
    attributes: dict[str, str | int | float] = {"holdfast.job": job_id}
    for name in ("incident", "attempt", "next_attempt", "cause", "decision", "steps_lost"):
        value = getattr(incident, name)
        if value is not None:
            attributes[f"holdfast.{name}"] = value
    found = [TraceSpan(f"incident {incident.cause}", begins, ends, attributes)]
    at = begins
    ordered = [phase for phase in PHASES if phase in known]
    for phase in (*ordered, *(phase for phase in known if phase not in PHASES)):
        found.append(TraceSpan(phase, at, at + known[phase], {}))
        at += known[phase]
    return found
