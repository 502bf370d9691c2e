"""All that the recovery core can be told. Frozen values; `core.handle(one, now)` takes each.

Duties of the shell that feeds them:

- `AgentUp` at first contact with an agent, after each restart of it (new incarnation), whenever
  its `ready` turns true, and when an agent that was reported lost answers again.
- A signal may be fed more than once, and late: the core sorts out what is stale.
- Every command effect (`Fence`, `Form`, ...) ends in its answer or in `CommandFailed`; an answer
  that never comes is covered by the core's own deadlines.
- `RemoteCheckpoints` before the first `AgentUp`, and again every few seconds while the phase is
  FINISHING: a checkpoint may become durable whose writer's answer nobody lived to hear.
- `Tick` when `core.next_deadline()` has passed; ticks too early or too often do no harm.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast_service.registry import RemoteCheckpoint
from holdfast_workers.messages import AgentReport, Signal


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
    where it is merely silent: as long as *no* member of its attempt is known to have stopped, no
    new one is formed. Say it again with True as soon as it is known."""


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
    lower case: "fence", "form", "warm_up", "set_partner", "finalize_checkpoint", "stop"."""

    agent: str
    command: str
    attempt: int
    why: str
    incarnation: str = ""
    step: int = 0
    """Of a `FinalizeCheckpoint`: which step."""


@dataclass(frozen=True)
class StepCommitted:
    """The newest step known to be committed, from metric rows. Only makes figures better."""

    attempt: int
    step: int


@dataclass(frozen=True)
class RemoteCheckpoints:
    """Finished checkpoints found in the remote tier; replaces what was known of it."""

    found: tuple[RemoteCheckpoint, ...]


@dataclass(frozen=True)
class CheckpointFinalized:
    """Answer to `FinalizeCheckpoint`: the manifest is durable; `deleted` fell to retention."""

    step: int
    attempt: int
    uri: str
    nbytes: int
    deleted: tuple[str, ...] = field(default=())


@dataclass(frozen=True)
class CancelRequested:
    reason: str


@dataclass(frozen=True)
class Tick:
    """Time has passed; a deadline may be over."""


Input = (
    AgentUp
    | AgentLost
    | NodeWord
    | Signals
    | Fenced
    | CommandFailed
    | StepCommitted
    | RemoteCheckpoints
    | CheckpointFinalized
    | CancelRequested
    | Tick
)
