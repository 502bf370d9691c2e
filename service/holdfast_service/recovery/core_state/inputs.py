"""Inputs: the complete set of events that the recovery core handles.

Inputs are frozen values; the shell passes each to `core.handle(event, now)`. The shell must send:

- `AgentUp` at first contact with an agent, after each restart of the agent (a new incarnation),
  when its `ready` becomes true, and when an agent that was reported lost answers again.
- For every command effect (`Fence`, `Form`, ...) its answer or `CommandFailed`. The core's own
  deadlines cover an answer that never arrives.
- `RemoteCheckpoints` before the first `AgentUp`. If the remote tier does not answer, `known` is
  False, and the input is sent again when the tier answers. It is also sent every few seconds in
  phase FINISHING: a checkpoint may have become durable although its writer died before it answered.
- `Tick` when `core.next_deadline()` has passed. Early and repeated ticks are harmless.

Signals may arrive late and more than once: the core ignores stale ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast_service.job_model.supervisor_protocol import StopKind
from holdfast_service.placement.restore_points import RemoteCheckpoint
from holdfast_service.policy.quarantine import Avoided
from holdfast_workers.fault_injection.kinds import Injection
from holdfast_workers.protocol.answers import AgentReport, WorkerReport
from holdfast_workers.protocol.commands import CommandKind
from holdfast_workers.protocol.findings import HealthReport
from holdfast_workers.protocol.messages import Inspection, StepRow
from holdfast_workers.protocol.signals import FailedShard, ShardRecord, Signal


@dataclass(frozen=True)
class AgentUp:
    """An agent answered: at first contact, after a restart, when it became ready, or after it was
    reported lost."""

    report: AgentReport


@dataclass(frozen=True)
class AgentLost:
    """An agent has ended or is unreachable. The workers of an agent that ended die with it."""

    agent: str
    why: str
    incarnation: str = ""
    """The incarnation that was lost; "" means the present one."""
    at: float | None = None
    """When the loss was detected; None means at the `now` of the call."""
    certain: bool = True
    """Whether its process is known to have ended, by its own kernel or by the raylet of its node.
    The end of a connection is no proof. False for an agent that is silent: its ranks may step until
    its lease has ended (`LeaseEnded`), and the core forms no new world before that. If the death
    becomes known later, the shell sends `LeaseEnded` with `certain`."""


@dataclass(frozen=True)
class LeaseEnded:
    """The lease of one incarnation of an agent has ended: the ranks that it may still run hold
    before their next step. This proves that they apply no further step."""

    agent: str
    incarnation: str = ""
    """The incarnation; "" stands for the one before this supervisor first reached the agent."""
    certain: bool = False
    """Whether its process is known to have ended; that proof needs no lease."""


@dataclass(frozen=True)
class NodeStatus:
    """The cluster's report on the node of a lost agent. It follows `AgentLost`, which does not wait
    for it. It only names the cause in the incident and changes no decision: the agent is lost in
    either case."""

    agent: str
    lost: bool
    evidence: str


@dataclass(frozen=True)
class Signals:
    """Signals of agents, in any order."""

    signals: tuple[Signal, ...]


@dataclass(frozen=True)
class Fenced:
    """Answer to `Fence`: all workers of attempts older than `attempt` on this agent are parked or
    killed, and `report.held` is the agent's complete inventory."""

    agent: str
    attempt: int
    report: AgentReport


@dataclass(frozen=True)
class CommandFailed:
    """A command could not be delivered or was refused."""

    agent: str
    command: CommandKind
    attempt: int
    why: str
    incarnation: str = ""
    step: int = 0
    """The step of a `FinalizeCheckpoint`."""
    refused: bool = False
    """Whether the remote tier refused a `FinalizeCheckpoint`'s manifest; a later try may
    succeed."""
    number: int = 0
    """The number of an `Inspect`."""


@dataclass(frozen=True)
class Inspected:
    """Answer to `Inspect`: the agent's ranks as seen from outside their processes."""

    agent: str
    attempt: int
    number: int
    inspections: tuple[Inspection, ...]
    incarnation: str = ""


@dataclass(frozen=True)
class PartnersSet:
    """Answer to `SetPartners`: the rank on this agent replicates to these agents now."""

    agent: str
    attempt: int
    rank: int
    partners: tuple[str, ...]
    incarnation: str = ""


@dataclass(frozen=True)
class MeshPrepared:
    """Answer to `PrepareMesh`."""

    agent: str
    attempt: int


@dataclass(frozen=True)
class StepCommitted:
    """The newest step known to be committed, from metric rows. The core uses it to update progress,
    to free former memory checkpoints, and to retry failed links and commands."""

    attempt: int
    step: int
    protected: int = -1
    """The newest step that all partners of all ranks held at that time; -1: none."""


@dataclass(frozen=True)
class StepsMeasured:
    """Metric rows by ascending step. Several agents may report the same row."""

    rows: tuple[StepRow, ...]


@dataclass(frozen=True)
class RanksTimed:
    """How long each rank of a program computed for a step, on average since the time before."""

    row: StepRow
    """A row of which only `compute_s`, `step_time_s` and its place mean something."""


@dataclass(frozen=True)
class DamagedCheckpoint:
    """A finished folder of the remote tier whose manifest is unreadable."""

    step: int
    uri: str
    why: str


@dataclass(frozen=True)
class RemoteCheckpoints:
    """The finished checkpoints in the remote tier. Replaces the previous listing."""

    found: tuple[RemoteCheckpoint, ...]
    damaged: tuple[DamagedCheckpoint, ...] = ()
    known: bool = True
    """False: the remote tier does not answer and may hold any checkpoint. The core then does not
    start training from the seed."""
    problem: str = ""
    """Why the remote tier does not answer."""


@dataclass(frozen=True)
class CheckpointFinalized:
    """Answer to `FinalizeCheckpoint`: the manifest is durable."""

    step: int
    attempt: int
    uri: str
    nbytes: int
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class WorkersPolled:
    """An agent's workers as it reported them to a poll, every second or two, because a signal may
    have been lost. The answers of one agent arrive in the order of the polls."""

    agent: str
    incarnation: str
    workers: tuple[WorkerReport, ...]
    shards: tuple[ShardRecord, ...] = ()
    """Shards that the agent has saved and that no manifest contains yet."""
    failed_shards: tuple[FailedShard, ...] = ()
    """Shards that the agent has given up."""
    health: HealthReport = field(default_factory=HealthReport)
    """The health of the agent's node."""


@dataclass(frozen=True)
class StopRequested:
    """Commit a last step, save it to the remote tier, and end, all before `deadline`. The input may
    be repeated: a later deadline changes nothing, an earlier deadline applies."""

    kind: StopKind
    reason: str
    deadline: float


@dataclass(frozen=True)
class LinkChecked:
    """Result of a network check of the agent's node. Non-empty `why`: bytes do not reach the node
    and return intact, although other nodes reach each other. Empty `why`: they do again, after an
    earlier failure."""

    agent: str
    incarnation: str
    why: str


@dataclass(frozen=True)
class NodesDraining:
    """Ray node id → when the cluster removes the node (Unix seconds; None: unknown)."""

    nodes: Mapping[str, float | None]


@dataclass(frozen=True)
class NodeChecked:
    """Answer to `CheckNode`: the report contains the findings."""

    report: AgentReport


@dataclass(frozen=True)
class NodesAvoided:
    """The nodes that the control plane avoids, by name. Replaces the previous set."""

    nodes: Mapping[str, Avoided]


@dataclass(frozen=True)
class SizeOrdered:
    """The size that an elastic job is to have. Replaces the previous order."""

    nodes: int | None
    """Most nodes that may train; None: as many as the job may have."""
    is_held: bool = False
    """Other jobs wait for all nodes that it could take."""


@dataclass(frozen=True)
class NoPlace:
    """The nodes that the job was to start on are taken, and those with room are reserved for
    others."""


@dataclass(frozen=True)
class FaultRequested:
    """A user requested an injected fault; sent once for each number. A fault of a rank or of its
    node names the rank."""

    number: int
    fault: Injection


@dataclass(frozen=True)
class Tick:
    """Time has passed; a deadline may have been reached."""


Input = (
    AgentUp
    | AgentLost
    | LeaseEnded
    | NodeStatus
    | Signals
    | Fenced
    | CommandFailed
    | Inspected
    | PartnersSet
    | MeshPrepared
    | StepCommitted
    | StepsMeasured
    | RanksTimed
    | RemoteCheckpoints
    | CheckpointFinalized
    | WorkersPolled
    | StopRequested
    | NodesAvoided
    | NodesDraining
    | NodeChecked
    | LinkChecked
    | FaultRequested
    | SizeOrdered
    | NoPlace
    | Tick
)
