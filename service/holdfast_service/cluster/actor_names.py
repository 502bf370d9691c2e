"""Names on the Ray cluster: deterministic, so that what exists is adopted, and of one installation.

Several installations, each with a database of its own, may use one Ray cluster. An installation
looks only into its namespace, and at placement groups and memory folders with its id.
"""

from __future__ import annotations

TOKEN_PREPARER = "tokens"
"""Name of the actor that prepares the sources of all jobs."""


def namespace(installation: str) -> str:
    return f"holdfast-{installation}"


def supervisor(job_id: str) -> str:
    return f"supervisor:{job_id}"


def agent(job_id: str, seat: str) -> str:
    return f"agent:{job_id}:{seat}"


def placement_group(installation: str, job_id: str) -> str:
    """Name of the job's placement group. It has the installation's id, because Ray's table of
    placement groups shows no namespace."""
    return f"nodes:{installation}:{job_id}"


def growth_group(installation: str, job_id: str, digest: str) -> str:
    """Name of the placement group for the nodes that a queued job lacks; `digest` is that of the
    request."""
    return f"wanted:{installation}:{job_id}:{digest}"


def is_growth_group(name: str, installation: str) -> bool:
    return name.startswith(f"wanted:{installation}:")


def occupying_group(installation: str, digest: str) -> str:
    """Name of the placement group on a node that a job is kept off while it is placed; `digest` is
    unique."""
    return f"occupied:{installation}:{digest}"


def holds_no_job(name: str, installation: str) -> bool:
    """Whether what the placement group of this name has is free for the installation's jobs."""
    own = occupying_group(installation, "")
    return is_growth_group(name, installation) or name.startswith(own)


def memory_folder(installation: str, job_id: str) -> str:
    """The job's folder in the shared memory of a node."""
    return f"{installation}.{job_id}"


def job_of(name: str) -> str | None:
    """The job that owns the actor of this name; None: not Holdfast's."""
    kind, _, rest = name.partition(":")
    if kind not in ("supervisor", "agent") or not rest:
        return None
    return rest.partition(":")[0]


def job_of_group(name: str, installation: str) -> str | None:
    """The job that owns the placement group of this name; None: not this installation's."""
    prefix = placement_group(installation, "")
    return name.removeprefix(prefix).partition(":")[0] if name.startswith(prefix) else None


def is_group_of(name: str, installation: str, job_id: str) -> bool:
    """Whether the placement group of this name is of the job: of all its nodes, or of one seat."""
    own = placement_group(installation, job_id)
    return name == own or name.startswith(f"{own}:")
