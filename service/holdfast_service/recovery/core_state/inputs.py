"""All that the recovery core can be told. Frozen values; `core.handle(one, now)` takes each.

Duties of the shell that feeds them:

- `AgentUp` at first contact with an agent, after each restart of it (new incarnation), whenever
  its `ready` turns true, and when an agent that was reported lost answers again.
- A signal may be fed more than once, and late: the core sorts out what is stale.
- Every command effect (`Fence`, `Form`, ...) ends in its answer or in `CommandFailed`; an answer
  that never comes is covered by the core's own deadlines.
- `RemoteCheckpoints` before the first `AgentUp` (not `known` if the remote tier does not answer,
  and again when it does), and again every few seconds while the phase is
  FINISHING: a checkpoint may become durable whose writer's answer nobody lived to hear.
- `Tick` when `core.next_deadline()` has passed; ticks too early or too often do no harm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast_service.job_model.supervisor_protocol import StopKind
from holdfast_service.placement.restore_points import RemoteCheckpoint
from holdfast_service.policy.quarantine import Avoided
from holdfast_workers.fault_injection.kinds import Injection
from holdfast_workers.protocol.messages import (
    AgentReport,
    Inspection,
    Signal,
    StepRow,
    WorkerReport,
)


@dataclass(frozen=True)
class AgentUp:
    """An agent answered: at first contact, restarted, become ready, or found alive again."""

    report: AgentReport


@dataclass(frozen=True)
class AgentLost:
    """An agent is gone or cannot be reached. Its workers die with it."""

    agent: str
    why: str
    incarnation: str = ""
    """Which life of the agent was lost; "" means the present one."""
    at: float | None = None
    """When it was seen; None means at the `now` of the call."""
    certain: bool = True
    """Whether its processes are known to be dead (connection closed, node declared dead). False
    where it is merely silent: its ranks may step until its lease has ended (`LeaseEnded`), and no
    new world is formed before. Say it again with True as soon as it is known."""


@dataclass(frozen=True)
class LeaseEnded:
    """A life of an agent was granted nothing for so long that the ranks it may still run hold
    before their next step: proof that they are out of the way."""

    agent: str
    incarnation: str = ""
    """Which life of it; "": whichever it was in before this supervisor heard it."""
    certain: bool = False
    """Whether its process is known to have ended, which needs no lease."""


@dataclass(frozen=True)
class NodeWord:
    """What the cluster says of the node of a lost agent. Decides nothing: whatever it is, the
    agent is gone. It names the cause, and comes after `AgentLost`, which waits for nobody."""

    agent: str
    lost: bool
    evidence: str


@dataclass(frozen=True)
class Signals:
    """What agents saw, in any order."""

    signals: tuple[Signal, ...]


@dataclass(frozen=True)
class Fenced:
    """Answer to `Fence`: no worker of an attempt older than `attempt` runs on this agent any more
    (parked or killed), and `report.held` is its whole inventory."""

    agent: str
    attempt: int
    report: AgentReport


@dataclass(frozen=True)
class CommandFailed:
    """A command could not be delivered or was refused. `command` is the effect's class name in
    lower case: "fence", "form", "warm_up", "set_partners", "free_memory", "set_intervals",
    "finish", "inspect", "save_held", "finalize_checkpoint", "check_node", "inject", "stop"."""

    agent: str
    command: str
    attempt: int
    why: str
    incarnation: str = ""
    step: int = 0
    """Of a `FinalizeCheckpoint`: which step."""
    refused: bool = False
    """Of a `FinalizeCheckpoint`: the remote tier does not take it now."""
    number: int = 0
    """Of an `Inspect`: which look."""


@dataclass(frozen=True)
class Inspected:
    """Answer to `Inspect`: the agent's ranks as they are seen from outside."""

    agent: str
    attempt: int
    number: int
    inspections: tuple[Inspection, ...]
    incarnation: str = ""


@dataclass(frozen=True)
class PartnersSet:
    """Answer to `SetPartners`: the rank on this agent replicates to these agents by now."""

    agent: str
    attempt: int
    rank: int
    partners: tuple[str, ...]
    incarnation: str = ""


@dataclass(frozen=True)
class StepCommitted:
    """The newest step known to be committed, from metric rows. Only makes figures better, frees
    memory that nobody needs any more, and gives links and commands that failed another chance."""

    attempt: int
    step: int
    protected: int = -1
    """The newest step that all partners of all ranks held by then."""


@dataclass(frozen=True)
class StepsMeasured:
    """Metric rows, ascending; what one agent tells, another may have told before."""

    rows: tuple[StepRow, ...]


@dataclass(frozen=True)
class DamagedCheckpoint:
    """A folder of the remote tier that was finished, and whose manifest cannot be read."""

    step: int
    uri: str
    why: str


@dataclass(frozen=True)
class RemoteCheckpoints:
    """Finished checkpoints found in the remote tier; replaces what was known of it."""

    found: tuple[RemoteCheckpoint, ...]
    damaged: tuple[DamagedCheckpoint, ...] = ()
    known: bool = True
    """False: it does not answer, and may hold any. Nothing is started from the seed then."""
    problem: str = ""
    """Why it does not answer."""


@dataclass(frozen=True)
class CheckpointFinalized:
    """Answer to `FinalizeCheckpoint`: the manifest is durable."""

    step: int
    attempt: int
    uri: str
    nbytes: int
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class WorkersSeen:
    """An agent's workers as it told them when it was asked, every second or so: a signal may have
    been lost on its way. The answers of one agent come in the order in which it was asked."""

    agent: str
    incarnation: str
    workers: tuple[WorkerReport, ...]
    shards: tuple[dict[str, Any], ...] = ()
    """Records of shards that it has saved and that are in no manifest yet."""


@dataclass(frozen=True)
class StopRequested:
    """Make a last step, save it to the remote tier, end: until `deadline`. May be said again; a
    later deadline then changes nothing, an earlier one hastens the end."""

    kind: StopKind
    reason: str
    deadline: float


@dataclass(frozen=True)
class Exchanged:
    """No byte came to the agent's node and back unharmed, though it did between others; or, where
    that was said before, one did now: then `why` is empty."""

    agent: str
    incarnation: str
    why: str


@dataclass(frozen=True)
class NodesDraining:
    """Nodes of the cluster that are to be taken away, by Ray's id, and when (Unix seconds; None:
    nobody said)."""

    nodes: Mapping[str, float | None]


@dataclass(frozen=True)
class NodeChecked:
    """Answer to `CheckNode`: what was found is in the report."""

    report: AgentReport


@dataclass(frozen=True)
class NodesAvoided:
    """The nodes that the control plane has set aside, by name; replaces what was known."""

    nodes: Mapping[str, Avoided]


@dataclass(frozen=True)
class FaultWanted:
    """Somebody wants a fault; fed once for each number. A rank's or a node's names its rank."""

    number: int
    fault: Injection


@dataclass(frozen=True)
class Tick:
    """Time has passed; a deadline may be over."""


Input = (
    AgentUp
    | AgentLost
    | LeaseEnded
    | NodeWord
    | Signals
    | Fenced
    | CommandFailed
    | Inspected
    | PartnersSet
    | StepCommitted
    | StepsMeasured
    | RemoteCheckpoints
    | CheckpointFinalized
    | WorkersSeen
    | StopRequested
    | NodesAvoided
    | NodesDraining
    | NodeChecked
    | Exchanged
    | FaultWanted
    | Tick
)
