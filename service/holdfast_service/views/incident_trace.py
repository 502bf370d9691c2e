"""An incident as a trace: one span for the whole of it, and one below for each phase. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PHASES = ("detect", "gather", "fence", "decide", "wait", "form", "restore", "first_step")
"""In the order of a recovery; another that an incident names comes last."""


@dataclass(frozen=True)
class Span:
    """Times in Unix seconds."""

    name: str
    begins: float
    ends: float
    attributes: Mapping[str, str | int | float]


def spans(job_id: str, told: Mapping[str, Any]) -> list[Span]:
    """Of an incident that is over, as its last event told of it; the whole comes first."""
    ends = float(told.get("closed_at") or told.get("opened_at") or 0.0)
    begins = float(told.get("signalled_at") or told.get("opened_at") or ends)
    known: dict[str, float] = {
        phase: float(taken_s)
        for phase, taken_s in (told.get("phases_s") or {}).items()
        if phase != "total"
    }
    ordered = [phase for phase in PHASES if phase in known]
    ordered += [phase for phase in known if phase not in PHASES]
    attributes: dict[str, str | int | float] = {"holdfast.job": job_id}
    for name in ("incident", "attempt", "next_attempt", "cause", "decision", "steps_lost"):
        value = told.get(name)
        if isinstance(value, str | int | float):
            attributes[f"holdfast.{name}"] = value
    found = [Span(f"incident {told.get('cause', '')}".rstrip(), begins, ends, attributes)]
    at = begins
    for phase in ordered:
        found.append(Span(phase, at, at + known[phase], {}))
        at += known[phase]
    return found
