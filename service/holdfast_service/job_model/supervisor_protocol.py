"""What a supervisor tells the reconciler, and what the reconciler asks of the cluster.

Events flow by pull: the supervisor keeps numbered events; the reconciler fetches those after the
last number it has stored and writes them, with the rows they change, in one transaction. An
event says everything that the tables need, so a replay from number 0 rebuilds them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from holdfast_service.job_model.lifecycle import Phase
from holdfast_service.policy.quarantine import Avoided
from holdfast_workers.protocol.messages import Beat, LogLine, StepRow

__all__ = [
    "Capacity",
    "Cluster",
    "ClusterUnavailable",
    "Cursors",
    "EventKind",
    "JobLaunch",
    "NodeCapacity",
    "Phase",
    "StopKind",
    "Stopping",
    "SupervisorEvent",
    "SupervisorReport",
    "SupervisorUnavailable",
]


class EventKind(StrEnum):
    """`data` of each kind, all JSON:

    - PHASE: {phase}
    - ATTEMPT_FORMING: {attempt, mesh, world_size, members: [{rank, worker, agent, node_id, host,
      pid, role}], standbys: [{agent, node_id, host, workers: [{worker, pid}]}], restore: {step,
      tiers: {rank: tier}, sources: {rank: agent}}, cause_incident}
    - ATTEMPT_RUNNING: {attempt, members (with final pids), joined: {rank: {phases_s}}, first_step}
    - ATTEMPT_ENDED: {attempt, reason, last_step}
    - INCIDENT_OPENED / INCIDENT_UPDATED / INCIDENT_CLOSED: {incident (number in job), cause,
      attempt, lost: [..], evidence: [..], decision, reason, restored_step, steps_lost,
      tiers: {rank: tier}, phases_s: {gather, fence, decide, form, restore, first_step, total},
      suspects: [{rank, score, reasons, agent, node_id, worker}], stacks: [{ranks, frames}],
      opened_at, closed_at, resolution}
    - CHECKPOINT_SAVED: {step, attempt, tier: "remote", uri, nbytes, mesh, metrics}
    - CHECKPOINT_DELETED: {step, uri, why}
    - CHECKPOINT_BAD: {step, uri (of the remote tier, else ""), message, copy (in memory: {agent,
      place, rank, attempt, step, incarnation}), corrupt ({attempt, step}: what attempts up to this
      one computed from this step on, wherever it lies)}
    - INITIALISED_FROM: {attempt, uri, step (that it goes on from), what}
    - MEMORY_PLACED: {attempt, copies, partners: {rank: [agents]}, recoverable: {lost machines:
      {probability, standard_error}}, unprotected: [in words]}
    - CHECKPOINT_INTERVAL: {tier: memory|remote, every_steps, before, cost_s, mtbf_s, step_s, why}
    - STALLED: {attempt, step, finding, reason, accused, suspects, stacks}: ranks are in a phase for
      longer than learned, and nothing is wrong as far as can be seen
    - STRAGGLER: {rank, agent, node_id, host, factor, since_step, step, since (when), attempt,
      state: slow|recovered|moved, why}: it computes `factor` times as long as its peers
    - GUARD_TRIPPED: {attempt, kind, step, window, value, loss, grad_norm, middle, limit, ranks,
      layer, what, micro_batch, decision, why, skipped, back_to, ledger: [[first window, end]]};
      null where it was not finite, or is not known
    - WAITING: {resource, until}
    - STANDBY: {agent, state}
    - NODE_HEALTH: {agent, node_id, host, findings: [{probe, kind, level, what, where, code, lost}],
      measured: {device: GB/s of its memory}}
    - NODE_DRAINING: {agent, node_id, host, ranks, deadline (or null)}: the cluster is about to take
      the node away
    - JOB_STOPPING: {wanted: cancel|pause, reason, deadline, step}: a last step is made and saved
    - FAULT_FAILED: {agent, why}: an injected fault that could not be brought about
    - STOP_UNDONE: {wanted, reason, step}: nothing was durable in time; the job goes on
    - ENDED: {outcome: SUCCEEDED|FAILED|CANCELLED|PAUSED, code, message, traceback, step,
      durable_step (of a job that was stopped: the newest in the remote tier, or null)}
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
    INITIALISED_FROM = "job.initialised_from"
    MEMORY_PLACED = "memory.placed"
    CHECKPOINT_INTERVAL = "checkpoint.interval"
    STALLED = "stalled"
    STRAGGLER = "straggler"
    GUARD_TRIPPED = "guard.tripped"
    WAITING = "waiting"
    STANDBY = "standby"
    NODE_HEALTH = "node.health"
    NODE_DRAINING = "node.draining"
    JOB_STOPPING = "job.stopping"
    STOP_UNDONE = "job.stop_undone"
    FAULT_FAILED = "fault.failed"
    ENDED = "ended"


class StopKind(StrEnum):
    """Why a job is to stop before its last step."""

    CANCEL = "cancel"
    PAUSE = "pause"


@dataclass(frozen=True)
class Stopping:
    """A job is to stop: with its last state in the remote tier, if that is there by `deadline`
    (`time.time()`); a deadline that is over means at once."""

    kind: StopKind
    reason: str
    deadline: float

    def data(self) -> dict[str, Any]:
        return {"wanted": self.kind.value, "reason": self.reason, "deadline": self.deadline}

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> Stopping:
        return cls(StopKind(data["wanted"]), data["reason"], data["deadline"])


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
    beats: tuple[Beat, ...] = ()  # how far each rank has come, ages as of now; () if not known


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
    set_aside: tuple[str, ...] = ()  # nodes beside these that are not to be used, and why


@dataclass(frozen=True)
class JobLaunch:
    """All a supervisor needs, immutable for the life of the job."""

    job_id: str
    name: str
    spec: dict[str, Any]  # the resolved JobSpec, as JSON
    data_dir: str  # the job's own folder; remote tier's default lies in it
    last_event: int = 0  # events already stored; the supervisor numbers on from here
    last_attempt: int = 0  # attempts already known; numbers only grow
    origin: dict[str, Any] | None = None  # what it begins with: {uri, step, what}; None: its seed
    skipped: tuple[tuple[int, int], ...] = ()  # the ledger, as far as it is stored
    avoid: dict[str, Avoided] = field(default_factory=dict)  # nodes set aside, as it begins
    package: bytes | None = field(default=None, repr=False)  # what `spec.code` names: a zip file


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

    async def stop(self, job_id: str, order: Stopping) -> None:
        """Let the job stop; to say it again is harmless."""
        ...

    async def inject(self, job_id: str, number: int, fault: dict[str, Any]) -> None:
        """Bring about a fault. To say it again is harmless: a number is taken once, and in order;
        returns once it is."""
        ...

    async def avoid(self, job_id: str, nodes: dict[str, Avoided]) -> None:
        """Tell the job's supervisor which nodes are set aside by now, all of them."""
        ...

    async def release(self, job_id: str) -> bool:
        """Remove every actor, placement group and segment of the job; True once none is left."""
        ...

    async def jobs_present(self) -> set[str]:
        """Ids of jobs that have anything on the cluster (for the reaper)."""
        ...
