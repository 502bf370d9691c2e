"""Converts an incident to a trace: a span for the incident, and a child span per phase. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PHASES = ("detect", "gather", "fence", "decide", "wait", "form", "restore", "first_step")
"""Phases in the order of a recovery; other phases of an incident come last."""


@dataclass(frozen=True)
class TraceSpan:
    """A span of a trace. Times are Unix seconds."""

    name: str
    begins: float
    ends: float
    attributes: Mapping[str, str | int | float]


def spans(job_id: str, incident: Mapping[str, Any]) -> list[TraceSpan]:
    """The spans of a closed incident, from its last event; the span of the incident is first."""
    ends = float(incident.get("closed_at") or incident.get("opened_at") or 0.0)
    begins = float(incident.get("signalled_at") or incident.get("opened_at") or ends)
    known: dict[str, float] = {
        phase: float(taken_s)
        for phase, taken_s in (incident.get("phases_s") or {}).items()
        if phase != "total"
    }
    ordered = [phase for phase in PHASES if phase in known]
    ordered += [phase for phase in known if phase not in PHASES]
    attributes: dict[str, str | int | float] = {"holdfast.job": job_id}
    for name in ("incident", "attempt", "next_attempt", "cause", "decision", "steps_lost"):
        value = incident.get(name)
        if isinstance(value, str | int | float):
            attributes[f"holdfast.{name}"] = value
    found = [TraceSpan(f"incident {incident.get('cause', '')}".rstrip(), begins, ends, attributes)]
    at = begins
    for phase in ordered:
        found.append(TraceSpan(phase, at, at + known[phase], {}))
        at += known[phase]
    return found
