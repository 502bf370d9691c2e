"""Signals: the events that an agent reports to its supervisor as they happen.

A signal carries one frozen dataclass per kind in `detail`; its kind follows from it. A new kind is
a member of `SignalKind`, a dataclass, and its name in `SignalDetail`. New fields have defaults.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from holdfast_workers.protocol.findings import (
    EarlyStop,
    HealthReport,
    ReplicaFinding,
    TripReport,
)
from holdfast_workers.protocol.messages import Beat, ErrorReport, Place, Tier, WorkerState


class SignalKind(StrEnum):
    """The events that an agent reports; each has a dataclass below."""

    WORKER_EXITED = "worker_exited"
    WORKER_FAILED = "worker_failed"
    WORKER_JOINED = "worker_joined"
    FIRST_STEP = "first_step"
    WORKER_DONE = "worker_done"
    WORKER_LEFT = "worker_left"
    SHARD_SAVED = "shard_saved"
    SHARD_FAILED = "shard_failed"
    SHARD_DELAYED = "shard_delayed"
    RETENTION_DONE = "tidied"
    PARTNER_LOST = "partner_lost"
    ZYGOTE_LOST = "zygote_lost"
    STORE_LOST = "store_lost"
    SOURCES_LOST = "sources_lost"
    RANK_STALLED = "rank_stalled"
    NODE_UNWELL = "node_unwell"
    GUARD_TRIPPED = "guard_tripped"
    RECOMPUTED = "recomputed"
    BAD_SHARD = "bad_shard"
    PROGRAM_ATTACHED = "program_attached"


@dataclass(frozen=True)
class WorkerExited:
    """A worker's process ended, by an exit code or by a signal."""

    exit_code: int | None = None
    signal: int | None = None
    name: str = ""
    """Name of the signal, e.g. "SIGKILL"."""
    step: int = 0
    """Steps applied to the worker's state; 0 if unknown."""
    state: WorkerState | None = None
    why: str = ""
    """The reason, if the agent itself killed the worker or knows why there is none."""
    out_of_memory: str = ""
    """The evidence that the kernel killed it for memory; "" if there is none."""
    kind: Literal[SignalKind.WORKER_EXITED] = SignalKind.WORKER_EXITED


@dataclass(frozen=True)
class WorkerFailed:
    """A worker raised and left its attempt."""

    error: ErrorReport
    trip: TripReport | None = None
    """The guard that tripped, if the error is one."""
    finding: ReplicaFinding | None = None
    """The corruption found, if the error is one."""
    kind: Literal[SignalKind.WORKER_FAILED] = SignalKind.WORKER_FAILED


@dataclass(frozen=True)
class WorkerJoined:
    """A worker restored its state and is about to step."""

    step: int
    tier: Tier
    phases_s: dict[str, float] = field(default_factory=dict)
    """Duration of each phase since the order."""
    kind: Literal[SignalKind.WORKER_JOINED] = SignalKind.WORKER_JOINED


@dataclass(frozen=True)
class FirstStep:
    """The first step of the attempt was computed."""

    step: int
    at: float
    committed: bool = True
    """False: its evaluation comes before, and then this signal once more."""
    kind: Literal[SignalKind.FIRST_STEP] = SignalKind.FIRST_STEP


@dataclass(frozen=True)
class WorkerDone:
    """A worker finished its last step."""

    step: int
    early: EarlyStop | None = None
    """Why this is the job's last step, although it has more."""
    kind: Literal[SignalKind.WORKER_DONE] = SignalKind.WORKER_DONE


@dataclass(frozen=True)
class WorkerLeft:
    """A worker left its attempt after `step`, so that the mesh can change; see
    `WorkerState.LEFT`."""

    step: int
    kind: Literal[SignalKind.WORKER_LEFT] = SignalKind.WORKER_LEFT


@dataclass(frozen=True)
class ShardRecord:
    """A shard in the remote tier: the state of one rank."""

    rank: int
    step: int
    attempt: int
    """The attempt that computed the state."""
    nbytes: int


@dataclass(frozen=True)
class ShardSaved:
    """Remote tier: the shard of one rank is durable."""

    shard: ShardRecord
    kind: Literal[SignalKind.SHARD_SAVED] = SignalKind.SHARD_SAVED


@dataclass(frozen=True)
class ShardFailed:
    """Remote tier: the save of a shard was given up."""

    step: int
    message: str = ""
    superseded: bool = False
    """Whether the copy was given up because a newer step is to be saved."""
    kind: Literal[SignalKind.SHARD_FAILED] = SignalKind.SHARD_FAILED


@dataclass(frozen=True, kw_only=True)
class FailedShard(ShardFailed):
    """A shard that its agent has given up, as it appears outside of a signal."""

    rank: int
    attempt: int


@dataclass(frozen=True)
class ShardDelayed:
    """Remote tier: the storage rejected a shard; the save is retried."""

    step: int
    message: str = ""
    kind: Literal[SignalKind.SHARD_DELAYED] = SignalKind.SHARD_DELAYED


@dataclass(frozen=True)
class RetentionDone:
    """Remote tier: retention has finished or failed."""

    step: int
    """Step of the `TidyRemoteTier` command."""
    deleted: dict[str, str] = field(default_factory=dict)
    """URI of each removed checkpoint → why."""
    message: str = ""
    """Why it failed; "" if it did not."""
    kind: Literal[SignalKind.RETENTION_DONE] = SignalKind.RETENTION_DONE


@dataclass(frozen=True)
class PartnerLost:
    """Replication to a partner fails."""

    partner: str
    """The partner's agent."""
    why: str = ""
    kind: Literal[SignalKind.PARTNER_LOST] = SignalKind.PARTNER_LOST


@dataclass(frozen=True)
class ZygoteLost:
    """The zygote died and is being restarted."""

    unfit: str = ""
    """Why this node can no longer start workers; "" if it can."""
    kind: Literal[SignalKind.ZYGOTE_LOST] = SignalKind.ZYGOTE_LOST


@dataclass(frozen=True)
class StoreLost:
    """The node's rendezvous store ended and is being forked again."""

    port: int
    """Its port, see `AgentReport.store_port`."""
    kind: Literal[SignalKind.STORE_LOST] = SignalKind.STORE_LOST


@dataclass(frozen=True)
class SourcesLost:
    """A reshard could not read parts from some ranks."""

    origins: tuple[tuple[str, Place, int], ...]
    """(agent, place, rank) of each commit that could not be read."""
    message: str = ""
    kind: Literal[SignalKind.SOURCES_LOST] = SignalKind.SOURCES_LOST


@dataclass(frozen=True)
class RankStalled:
    """A rank has been in its phase for longer than the learned limit."""

    beat: Beat
    kind: Literal[SignalKind.RANK_STALLED] = SignalKind.RANK_STALLED


@dataclass(frozen=True)
class NodeUnwell:
    """The node's health changed."""

    health: HealthReport
    kind: Literal[SignalKind.NODE_UNWELL] = SignalKind.NODE_UNWELL


@dataclass(frozen=True)
class GuardTripReported:
    """A guard tripped on all ranks, and training continues."""

    trip: TripReport
    kind: Literal[SignalKind.GUARD_TRIPPED] = SignalKind.GUARD_TRIPPED


@dataclass(frozen=True)
class StepRecomputed:
    """The step of `FormOrder.recheck` was computed again."""

    step: int
    digests: tuple[str, ...]
    """The digest of each rank."""
    kind: Literal[SignalKind.RECOMPUTED] = SignalKind.RECOMPUTED


@dataclass(frozen=True)
class DamagedShard:
    """A memory checkpoint failed its verification."""

    place: Place
    step: int | None
    """The step; None: not even its header is readable."""
    attempt: int | None
    """The attempt that computed the state."""
    message: str
    kind: Literal[SignalKind.BAD_SHARD] = SignalKind.BAD_SHARD


@dataclass(frozen=True)
class ProgramAttached:
    """A user's program works with Holdfast from now on, beyond being launched."""

    level: int
    """1: it reports its steps. 2: it also keeps checkpoints in memory."""
    integration: str = ""
    """The plug-in that attached: "lightning", "transformers", ...; "": the program itself."""
    kind: Literal[SignalKind.PROGRAM_ATTACHED] = SignalKind.PROGRAM_ATTACHED


SignalDetail = (
    WorkerExited
    | WorkerFailed
    | WorkerJoined
    | FirstStep
    | WorkerDone
    | WorkerLeft
    | ShardSaved
    | ShardFailed
    | ShardDelayed
    | RetentionDone
    | PartnerLost
    | ZygoteLost
    | StoreLost
    | SourcesLost
    | RankStalled
    | NodeUnwell
    | GuardTripReported
    | StepRecomputed
    | DamagedShard
    | ProgramAttached
)


@dataclass(frozen=True)
class Signal:
    """An event that an agent reports to its supervisor as it happens."""

    detail: Annotated[SignalDetail, Field(discriminator="kind")]
    agent: str
    """Name of the agent, see `AgentReport.agent`."""
    incarnation: str
    """Process lifetime of the agent, see `AgentReport.incarnation`."""
    seq: int
    """Number of the signal; grows by one within an incarnation."""
    at: float
    """When the agent saw the event."""
    attempt: int = 0
    rank: int | None = None
    worker: str | None = None
    """Name of the worker concerned, see `WorkerReport.worker`."""
    pid: int | None = None
    """Process id of that worker on the agent's node."""

    @property
    def kind(self) -> SignalKind:
        return self.detail.kind
