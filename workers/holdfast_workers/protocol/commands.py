"""Commands: everything that a supervisor asks of a node agent, each written once.

The recovery core requests the values of `Command` as effects; the supervisor's shell sends them,
and the agent carries them out. The shell asks the values of `Query` on its own. Both travel in a
`Request`. `agent` and `incarnation` name the agent that a command is meant for.

A new command is a member of `CommandKind`, a dataclass, and its name in `Command`. New fields have
defaults. Repeating a command must be harmless.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from holdfast_workers.protocol.messages import FormOrder, Partner, Place, SupervisorEvent
from holdfast_workers.protocol.process_identity import ProcessIdentity


class CommandKind(StrEnum):
    """The names of commands and queries."""

    FENCE = "fence"
    FORM = "form"
    WARM_UP = "warm_up"
    SET_PARTNERS = "set_partners"
    FREE_MEMORY = "free_memory"
    SET_INTERVALS = "set_intervals"
    FINISH = "finish"
    PREPARE_MESH = "prepare_mesh"
    LEAVE = "leave"
    INSPECT = "inspect"
    SAVE_SHARD = "save_shard"
    FINALIZE_CHECKPOINT = "finalize_checkpoint"
    TIDY_REMOTE_TIER = "tidy_remote_tier"
    CHECK_NODE = "check_node"
    INJECT_FAULT = "inject_fault"
    STOP = "stop"
    HELLO = "hello"
    DESCRIBE = "describe"
    POLL = "poll"
    LIST_EVENTS = "list_events"
    EXCHANGE_BYTES = "exchange_bytes"


@dataclass(frozen=True)
class Fence:
    """Announce `attempt` to the agent, which ends its part in every older attempt. Answer:
    `AgentReport`, once no worker of the node can apply another step of an older attempt."""

    agent: str
    attempt: int
    incarnation: str = ""
    condemned: tuple[str, ...] = ()
    """Workers that are known not to leave their attempt by themselves: the agent kills them at
    once."""
    caches: tuple[Partner, ...] = ()
    """The nodes that it may have token sets from until it gets its next order: of the last
    attempt."""
    kind: Literal[CommandKind.FENCE] = CommandKind.FENCE


@dataclass(frozen=True)
class Form:
    """Start the seats of `order`. The agent stops its workers that the order does not name, so that
    the number of processes never exceeds the capacity. Signals report how each worker joins."""

    agent: str
    order: FormOrder
    incarnation: str = ""
    kind: Literal[CommandKind.FORM] = CommandKind.FORM

    @property
    def attempt(self) -> int:
        return self.order.attempt


@dataclass(frozen=True)
class WarmUp:
    """The agent hosts no rank of `attempt`: it keeps its zygote running, and forks workers up to
    its capacity, so that no rank has to wait for a fork."""

    agent: str
    attempt: int
    incarnation: str = ""
    caches: tuple[Partner, ...] = ()
    """The nodes that it may have token sets from, as in `FormOrder`."""
    kind: Literal[CommandKind.WARM_UP] = CommandKind.WARM_UP


@dataclass(frozen=True)
class SetPartners:
    """The rank on `agent` replicates to all of `partners` from now on, without a new attempt."""

    agent: str
    attempt: int
    rank: int
    partners: tuple[Partner, ...]
    incarnation: str = ""
    kind: Literal[CommandKind.SET_PARTNERS] = CommandKind.SET_PARTNERS


@dataclass(frozen=True)
class FreeMemory:
    """The agent keeps memory checkpoints of this mesh only for these ranks: `own` ranks that it
    hosts, and `replicas` that it keeps for other agents. It frees all others, those of other meshes
    too: a standby gets no order that tells it that they will not be used again."""

    agent: str
    attempt: int
    mesh: dict[str, int]
    own: frozenset[int]
    replicas: frozenset[int]
    incarnation: str = ""
    kind: Literal[CommandKind.FREE_MEMORY] = CommandKind.FREE_MEMORY


@dataclass(frozen=True)
class SetIntervals:
    """Rank 0 on the agent proposes new save intervals, in steps, in the step agreement; they hold
    from that step on."""

    agent: str
    attempt: int
    memory: int
    remote: int
    incarnation: str = ""
    kind: Literal[CommandKind.SET_INTERVALS] = CommandKind.SET_INTERVALS


@dataclass(frozen=True)
class Finish:
    """The agent's ranks of `attempt` request a stop in the step agreement. After the next agreed
    step all ranks stop, save that step to the remote tier, and report that they are done."""

    agent: str
    attempt: int
    incarnation: str = ""
    kind: Literal[CommandKind.FINISH] = CommandKind.FINISH


@dataclass(frozen=True)
class PrepareMesh:
    """While `attempt` trains, fork a process for each of `ranks` of the mesh that the job changes
    to next, with all that can be built ahead. Answer once they exist, or prove impossible."""

    agent: str
    attempt: int
    mesh: dict[str, int]
    ranks: tuple[int, ...]
    incarnation: str = ""
    kind: Literal[CommandKind.PREPARE_MESH] = CommandKind.PREPARE_MESH


@dataclass(frozen=True)
class Leave:
    """The agent's ranks of `attempt` request in the step agreement that all ranks leave the attempt
    after the next agreed step. They keep that step in memory, and report that they have left."""

    agent: str
    attempt: int
    incarnation: str = ""
    kind: Literal[CommandKind.LEAVE] = CommandKind.LEAVE


@dataclass(frozen=True)
class Inspect:
    """Inspect the processes of the agent's ranks of `attempt` from outside. Answer:
    `Inspections`."""

    agent: str
    attempt: int
    number: int
    """Number of the inspection; it separates the answers from those to an earlier inspection."""
    incarnation: str = ""
    kind: Literal[CommandKind.INSPECT] = CommandKind.INSPECT


@dataclass(frozen=True)
class SaveShard:
    """Save the rank's shard of `step`, as `attempt` computed it, from the agent's memory at `place`
    to the remote tier. Its original saver is lost."""

    agent: str
    rank: int
    place: Place
    attempt: int
    step: int
    incarnation: str = ""
    kind: Literal[CommandKind.SAVE_SHARD] = CommandKind.SAVE_SHARD


@dataclass(frozen=True)
class FinalizeCheckpoint:
    """All shards of `step` are durable: write the manifest. Answer: `PublishedCheckpoint`."""

    agent: str
    step: int
    attempt: int
    incarnation: str = ""
    mesh: dict[str, int] = field(default_factory=dict)
    """The mesh of the attempt; empty: that of the job's spec."""
    kind: Literal[CommandKind.FINALIZE_CHECKPOINT] = CommandKind.FINALIZE_CHECKPOINT


@dataclass(frozen=True)
class TidyRemoteTier:
    """Move the `bad` checkpoints (URIs) into quarantine, then apply retention. A `tidied` signal
    with `step` reports the result. Checkpoints in `unfinished`, as (step, attempt), have no
    manifest yet and stay."""

    agent: str
    attempt: int
    step: int
    unfinished: tuple[tuple[int, int], ...]
    bad: frozenset[str]
    incarnation: str = ""
    limits: dict[int, int] = field(default_factory=dict)
    """Attempt → its last step that is part of history. A later checkpoint of it was published too
    late, by a process that had been paused, and goes into quarantine."""
    kind: Literal[CommandKind.TIDY_REMOTE_TIER] = CommandKind.TIDY_REMOTE_TIER


@dataclass(frozen=True)
class CheckNode:
    """Repeat the checks that precede the first use of a node. Answer: `AgentReport`."""

    agent: str
    incarnation: str = ""
    kind: Literal[CommandKind.CHECK_NODE] = CommandKind.CHECK_NODE


@dataclass(frozen=True)
class InjectFault:
    """The agent injects a fault that a user requested."""

    agent: str
    number: int
    fault: dict[str, str | int | float]
    """`Injection.document()`."""
    incarnation: str = ""
    kind: Literal[CommandKind.INJECT_FAULT] = CommandKind.INJECT_FAULT


@dataclass(frozen=True)
class Stop:
    """End all workers of the agent, because the job has ended. Memory checkpoints stay until the
    agent is released."""

    agent: str
    why: str
    incarnation: str = ""
    kind: Literal[CommandKind.STOP] = CommandKind.STOP


@dataclass(frozen=True)
class Hello:
    """Accept the supervisor of the request's epoch. Answer: `AgentReport`."""

    supervisor: ProcessIdentity | None = None
    """The supervisor's process; None: not known."""
    kind: Literal[CommandKind.HELLO] = CommandKind.HELLO


@dataclass(frozen=True)
class Describe:
    """Report the present state, to any supervisor. Answer: `AgentReport`."""

    kind: Literal[CommandKind.DESCRIBE] = CommandKind.DESCRIBE


@dataclass(frozen=True)
class Poll:
    """Report rows, digests and log lines newer than the cursors, bounded in number, and the present
    workers. Answer: `PollAnswer`."""

    after_row: tuple[int, int] = (0, 0)
    """(attempt, step)."""
    after_line: int = 0
    stored_line: int = 0
    """The lines up to this number are stored elsewhere."""
    most_lines: int = 0
    """The number of lines that there is room for."""
    acked: int = 0
    """The supervisor's events up to this number are stored elsewhere."""
    kind: Literal[CommandKind.POLL] = CommandKind.POLL


@dataclass(frozen=True)
class ListEvents:
    """Report the supervisor's events that the agent keeps. Answer: `KeptEvents`."""

    kind: Literal[CommandKind.LIST_EVENTS] = CommandKind.LIST_EVENTS


@dataclass(frozen=True)
class ExchangeBytes:
    """Exchange bytes with the agent at this address. Answer: `ExchangeResult`."""

    host: str
    port: int
    timeout_s: float
    kind: Literal[CommandKind.EXCHANGE_BYTES] = CommandKind.EXCHANGE_BYTES


Command = (
    Fence
    | Form
    | WarmUp
    | SetPartners
    | FreeMemory
    | SetIntervals
    | Finish
    | PrepareMesh
    | Leave
    | Inspect
    | SaveShard
    | FinalizeCheckpoint
    | TidyRemoteTier
    | CheckNode
    | InjectFault
    | Stop
)
Query = Hello | Describe | Poll | ListEvents | ExchangeBytes

AttemptCommand = (
    Fence | Form | WarmUp | SetPartners | FreeMemory | SetIntervals | Finish | PrepareMesh | Leave
)
"""Commands that belong to an attempt: an agent refuses them if it knows a later attempt."""

OpenQuery = Describe | Poll | ListEvents
"""Queries that an agent answers to any supervisor, whatever its epoch."""


@dataclass(frozen=True)
class Request:
    """A command or a query on its way to an agent."""

    command: Annotated[Command | Query, Field(discriminator="kind")]
    epoch: int = 0
    """Epoch of the supervisor; an agent refuses a lower epoch than the highest that it knows."""
    events: tuple[SupervisorEvent, ...] = ()
    """Events of the supervisor that the agent keeps for the next supervisor."""
