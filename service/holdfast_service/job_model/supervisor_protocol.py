"""The protocol between supervisor and reconciler, and the reconciler's interface to the cluster.

The reconciler pulls events: the supervisor keeps numbered events; the reconciler fetches those
after the last number it has stored and writes them, with the rows they change, in one transaction.
An event carries everything that the tables need, so a replay from number 0 rebuilds them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from holdfast_service.job_model.lifecycle import Phase
from holdfast_service.placement.restore_points import InitialCheckpoint
from holdfast_service.policy.quarantine import Avoided
from holdfast_workers.protocol.messages import Beat, LogLine, StepRow

__all__ = [
    "AvoidOrder",
    "Capacity",
    "Cluster",
    "ClusterUnavailable",
    "Cursors",
    "EventKind",
    "FaultOrder",
    "JobLaunch",
    "NodeCapacity",
    "Phase",
    "StopKind",
    "StopOrder",
    "SupervisorEvent",
    "SupervisorReport",
    "SupervisorUnavailable",
]


class EventKind(StrEnum):
    """The kinds of events of a supervisor. `data` of each kind, all JSON:

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
      place, rank, attempt, step, incarnation}), corrupt ({attempt, step}: every copy of what
      attempts up to this attempt computed from this step on)}
    - INITIALISED_FROM: {attempt, uri, step (from which it continues), what}
    - MEMORY_PLACED: {attempt, copies, partners: {rank: [agents]}, recoverable: {lost machines:
      {probability, standard_error}}, unprotected: [text]}
    - CHECKPOINT_INTERVAL: {tier: memory|remote, every_steps, before, cost_s, mtbf_s, step_s, why}
    - STALLED: {attempt, step, finding, reason, accused, suspects, stacks}: ranks are in a phase for
      longer than its learned limit, and no fault is visible
    - STRAGGLER: {rank, agent, node_id, host, factor, since_step, step, since (when), attempt,
      state: slow|recovered|moved, why}: the rank needs `factor` times its peers' time
    - GUARD_TRIPPED: {attempt, kind, step, window, value, loss, grad_norm, middle, limit, ranks,
      layer, what, micro_batch, decision, why, skipped, back_to, ledger: [[first window, end]]};
      null where a value was not finite, or is unknown
    - WAITING: {resource, until}
    - STANDBY: {agent, state}
    - NODE_HEALTH: {agent, node_id, host, findings: [{probe, kind, level, what, where, code, lost}],
      measured: {device: GB/s of its memory}}
    - NODE_DRAINING: {agent, node_id, host, ranks, deadline (or null)}: the cluster is about to
      remove the node
    - JOB_STOPPING: {wanted: cancel|pause, reason, deadline, step}: a last step is made and saved
    - FAULT_FAILED: {agent, why}: an injected fault could not be carried out
    - STOP_UNDONE: {wanted, reason, step}: no checkpoint was durable in time; training continues
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
class StopOrder:
    """Order to stop a job after its last state is in the remote tier, or at `deadline`
    (`time.time()`) without it. A deadline in the past means at once."""

    kind: StopKind
    reason: str
    deadline: float

    def data(self) -> dict[str, Any]:
        return {"wanted": self.kind.value, "reason": self.reason, "deadline": self.deadline}

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> StopOrder:
        return cls(StopKind(data["wanted"]), data["reason"], data["deadline"])


@dataclass(frozen=True)
class FaultOrder:
    """Order to inject a fault. The supervisor accepts each number once, in order."""

    number: int
    fault: dict[str, Any]  # `Injection.document()`


@dataclass(frozen=True)
class AvoidOrder:
    """The complete set of nodes that are set aside now, by name."""

    nodes: dict[str, Avoided]


@dataclass(frozen=True)
class SupervisorEvent:
    """A numbered event."""

    seq: int  # per job, from 1, without gaps, also across restarts of the supervisor
    at: float
    kind: EventKind
    data: dict[str, Any]


@dataclass(frozen=True)
class Cursors:
    """The position up to which the reconciler has stored everything. Each poll sends it, which
    acknowledges what came before."""

    event: int = 0
    row: tuple[int, int] = (0, 0)  # (attempt, step) of the last metric row
    logs: dict[str, int] = field(default_factory=dict)  # "<agent>.<incarnation>" -> seq


@dataclass(frozen=True)
class SupervisorReport:
    """The answer to a poll: everything after the cursors, up to a bound."""

    epoch: int
    phase: Phase
    step: int
    attempt: int
    events: tuple[SupervisorEvent, ...] = ()
    rows: tuple[StepRow, ...] = ()  # (attempt, step) > cursors.row, ascending, bounded number
    digests: dict[int, str] = field(default_factory=dict)  # step -> digest, newly known
    logs: tuple[LogLine, ...] = ()
    beats: tuple[Beat, ...] = ()  # the progress of each rank, ages as of now; () if unknown


@dataclass(frozen=True)
class NodeCapacity:
    """The resources of one node, in use or not."""

    node_id: str
    host: str
    cpus: float
    gpus: float


@dataclass(frozen=True)
class Capacity:
    """The resources of the cluster. `can_grow`: it adds nodes on demand."""

    nodes: tuple[NodeCapacity, ...]
    can_grow: bool
    set_aside: tuple[str, ...] = ()  # further nodes that must not be used, and why


@dataclass(frozen=True)
class JobLaunch:
    """The arguments of a supervisor; they do not change while it lives."""

    job_id: str
    name: str
    spec: dict[str, Any]  # the resolved JobSpec, as JSON
    data_dir: str  # the job's folder; the remote tier is in it by default
    last_event: int = 0  # number of events already stored; the supervisor continues from it
    last_attempt: int = 0  # number of the last known attempt; numbers only grow
    origin: InitialCheckpoint | None = None  # None: random from the seed
    skipped: tuple[tuple[int, int], ...] = ()  # the ledger of skipped windows, as stored
    avoid: dict[str, Avoided] = field(default_factory=dict)  # nodes that are set aside at the start
    package: bytes | None = field(
        default=None, repr=False
    )  # the zip file that `spec.code` refers to


class ClusterUnavailable(Exception):
    """The cluster does not answer at present; try again later."""


class SupervisorUnavailable(Exception):
    """The job's supervisor does not answer at present (it restarts, or was never created)."""


class Cluster(Protocol):
    """The operations that the reconciler needs from Ray. Every call has its own deadline."""

    async def capacity(self) -> Capacity: ...

    async def ensure_supervisor(self, launch: JobLaunch) -> bool:
        """Create the job's supervisor, or adopt the existing one. True if it was created."""
        ...

    async def poll(self, job_id: str, cursors: Cursors) -> SupervisorReport: ...

    async def stop(self, job_id: str, order: StopOrder) -> None:
        """Send the order to the job's supervisor. Idempotent."""
        ...

    async def inject(self, job_id: str, number: int, fault: dict[str, Any]) -> None:
        """Send a fault to the job's supervisor; returns when it has accepted the fault. Idempotent:
        the supervisor accepts each number once, in order."""
        ...

    async def avoid(self, job_id: str, nodes: dict[str, Avoided]) -> None:
        """Send the job's supervisor the complete set of nodes that are set aside now."""
        ...

    async def release(self, job_id: str) -> bool:
        """Remove every actor, placement group and segment of the job. True if none is left."""
        ...

    async def jobs_present(self) -> set[str]:
        """Ids of jobs that have anything on the cluster (for the reaper)."""
        ...
