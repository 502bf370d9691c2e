"""Deterministic names of what a job has on the cluster: "already exists" always means adopt."""

from __future__ import annotations

NAMESPACE = "holdfast"


def supervisor(job_id: str) -> str:
    return f"supervisor:{job_id}"


def agent(job_id: str, seat: str) -> str:
    return f"agent:{job_id}:{seat}"


def placement_group(job_id: str) -> str:
    return f"nodes:{job_id}"


def job_of(name: str) -> str | None:
    """The job that an actor or placement group of this name belongs to; None: not ours."""
    kind, _, rest = name.partition(":")
    if kind not in ("supervisor", "agent", "nodes") or not rest:
        return None
    return rest.partition(":")[0]
