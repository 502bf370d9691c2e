"""Deterministic names of a job's actors and placement group: an existing name is adopted."""

from __future__ import annotations

NAMESPACE = "holdfast"


def supervisor(job_id: str) -> str:
    return f"supervisor:{job_id}"


def agent(job_id: str, seat: str) -> str:
    return f"agent:{job_id}:{seat}"


def placement_group(job_id: str) -> str:
    return f"nodes:{job_id}"


def job_of(name: str) -> str | None:
    """The job that owns the actor or placement group of this name; None: not Holdfast's."""
    kind, _, rest = name.partition(":")
    if kind not in ("supervisor", "agent", "nodes") or not rest:
        return None
    return rest.partition(":")[0]
