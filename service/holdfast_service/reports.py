"""What a supervisor tells the reconciler, and what the reconciler asks of the cluster.

Events flow by pull: the supervisor keeps numbered events; the reconciler fetches those after the
last number it has stored and writes them, with the rows they change, in one transaction. An
event says everything that the tables need, so a replay from number 0 rebuilds them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from holdfast_workers.messages import LogLine, StepRow


class Phase(StrEnum):
    """What a supervisor says of its job; the reconciler maps it to the job's state."""

    STARTING = "STARTING"  # placement, agents, first rendezvous
    RUNNING = "RUNNING"
    RECOVERING = "RECOVERING"
    FINISHING = "FINISHING"  # last checkpoint under way
    ENDED = "ENDED"


class EventKind(StrEnum):
    """`data` of each kind, all JSON:

    - PHASE: {phase}
    - ATTEMPT_FORMING: {attempt, mesh, world_size, members: [{rank, worker, agent, node_id, host,
      pid, role}], standbys: [{agent, node_id, workers: [{worker, pid}]}], restore: {step, tiers:
      {rank: tier}, sources: {rank: agent}}, cause_incident}
    - ATTEMPT_RUNNING: {attempt, members (with final pids), joined: {rank: {phases_s}}, first_step}
    - ATTEMPT_ENDED: {attempt, reason, last_step}
    - INCIDENT_OPENED / INCIDENT_UPDATED / INCIDENT_CLOSED: {incident (number in job), cause,
      attempt, lost: [..], evidence: [..], decision, reason, restored_step, steps_lost,
      tiers: {rank: tier}, phases_s: {gather, fence, decide, form, restore, first_step, total},
      opened_at, closed_at, resolution}
    - CHECKPOINT_SAVED: {step, attempt, tier: "remote", uri, nbytes, mesh}
    - CHECKPOINT_DELETED: {step, uri, why}
    - CHECKPOINT_BAD: {step, uri, message}
    - WAITING: {resource, until}
    - STANDBY: {agent, state}
    - ENDED: {outcome: SUCCEEDED|FAILED|CANCELLED, code, message, traceback, step}
    """

    PHASE = "phase"
    ATTEMPT_FORMING = "attempt.forming"
    ATTEMPT_RUNNING = "attempt.running"
    ATTEMPT_ENDED = "attempt.ended"
    INCIDENT_OPENED = "incident.opened"
    INCIDENT_UPDATED = "incident.updated"
    INCIDENT_CLOSED = "incident.closed"
    CHECKPOINT_SAVED = "checkpoint.saved"
    CHECKPOINT_DELETED = "checkpoint.deleted"
    CHECKPOINT_BAD = "checkpoint.bad"
    WAITING = "waiting"
    STANDBY = "standby"
    ENDED = "ended"


@dataclass(frozen=True)
class SupervisorEvent:
    seq: int  # per job, from 1, without gaps, also across restarts of the supervisor
    at: float
    kind: EventKind
    data: dict[str, Any]


@dataclass(frozen=True)
class Cursors:
    """How far the reconciler has stored; sent with each poll, and an acknowledgement of it."""

    event: int = 0
    row: tuple[int, int] = (0, 0)  # (attempt, step) of the last metric row
    logs: dict[str, int] = field(default_factory=dict)  # "<agent>.<incarnation>" -> seq


@dataclass(frozen=True)
class SupervisorReport:
    epoch: int
    phase: Phase
    step: int
    attempt: int
    events: tuple[SupervisorEvent, ...] = ()
    rows: tuple[StepRow, ...] = ()  # (attempt, step) > cursors.row, ascending, bounded
    digests: dict[int, str] = field(default_factory=dict)  # step -> digest, newly known
    logs: tuple[LogLine, ...] = ()


@dataclass(frozen=True)
class NodeCapacity:
    node_id: str
    host: str
    cpus: float
    gpus: float


@dataclass(frozen=True)
class Capacity:
    nodes: tuple[NodeCapacity, ...]
    can_grow: bool


@dataclass(frozen=True)
class JobLaunch:
    """All a supervisor needs, immutable for the life of the job."""

    job_id: str
    name: str
    spec: dict[str, Any]  # the resolved JobSpec, as JSON
    data_dir: str  # the job's own folder; remote tier's default lies in it
    last_event: int = 0  # events already stored; the supervisor numbers on from here
    last_attempt: int = 0  # attempts already known; numbers only grow


class ClusterUnavailable(Exception):
    """The cluster cannot be asked at present; try again later."""


class SupervisorUnavailable(Exception):
    """The job's supervisor cannot be reached at present (restarting, or never made)."""


class Cluster(Protocol):
    """All that the reconciler may ask of Ray. Every call has its own deadline."""

    async def capacity(self) -> Capacity: ...

    async def ensure_supervisor(self, launch: JobLaunch) -> bool:
        """Create the job's supervisor, or adopt the one of that name. True if it was created."""
        ...

    async def poll(self, job_id: str, cursors: Cursors) -> SupervisorReport: ...

    async def cancel(self, job_id: str, reason: str) -> None: ...

    async def release(self, job_id: str) -> bool:
        """Remove every actor, placement group and segment of the job; True once none is left."""
        ...

    async def jobs_present(self) -> set[str]:
        """Ids of jobs that have anything on the cluster (for the reaper)."""
        ...
