"""Effects: the complete set of requests that the recovery core makes to its shell.

The shell (`supervisor/supervisor.py`) executes effects in the order in which the core returned
them. Contract:

- Commands to different agents may be sent in parallel.
- `Emit` effects keep their order. An `Emit` that precedes a command must be in the journal before
  the command is sent.
- Each command names its agent and the `incarnation` of the agent that it is meant for.
- Each command ends in its answer (see `inputs.py`) or in `CommandFailed`.
- `End` is the last effect of a job.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from holdfast_service.job_model.events.kinds import JobEvent
from holdfast_workers.fault_injection.kinds import Injection
from holdfast_workers.protocol.messages import FormOrder, Partner, Place


@dataclass(frozen=True)
class Fence:
    """Announce `attempt` to the agent. The agent parks or kills its workers of older attempts and
    answers with `Fenced`."""

    agent: str
    attempt: int
    incarnation: str = ""
    condemned: tuple[str, ...] = ()
    """Workers that are known not to leave their attempt by themselves: the agent kills them at
    once."""


@dataclass(frozen=True)
class Form:
    """Start the seats of `order`. The agent stops its workers that the order does not name, so that
    the number of processes never exceeds the capacity."""

    agent: str
    order: FormOrder
    incarnation: str = ""

    @property
    def attempt(self) -> int:
        return self.order.attempt


@dataclass(frozen=True)
class WarmUp:
    """The agent hosts no rank of `attempt`: it keeps its zygote and its warm workers running."""

    agent: str
    attempt: int
    incarnation: str = ""


@dataclass(frozen=True)
class SetPartners:
    """The rank on `agent` replicates to all of `partners` from now on. Answer: `PartnersSet`."""

    agent: str
    attempt: int
    rank: int
    partners: tuple[Partner, ...]
    incarnation: str = ""


@dataclass(frozen=True)
class FreeMemory:
    """The agent keeps memory checkpoints of this mesh only for these ranks: `own` ranks that it
    hosts, and `replicas` that it keeps for other agents. It frees all others."""

    agent: str
    attempt: int
    mesh: dict[str, int]
    own: frozenset[int]
    replicas: frozenset[int]
    incarnation: str = ""


@dataclass(frozen=True)
class SetIntervals:
    """Rank 0 on the agent proposes new save intervals, in steps, in the step agreement."""

    agent: str
    attempt: int
    memory: int
    remote: int
    incarnation: str = ""


@dataclass(frozen=True)
class Finish:
    """The agent's ranks of `attempt` request a stop in the step agreement. After the next agreed
    step all ranks stop, save that step to the remote tier, and report that they are done."""

    agent: str
    attempt: int
    incarnation: str = ""


@dataclass(frozen=True)
class Inspect:
    """Inspect the processes of the agent's ranks of `attempt` from outside. Answer: `Inspected`."""

    agent: str
    attempt: int
    number: int
    """Number of the inspection; it separates the answers from those to an earlier inspection."""
    incarnation: str = ""


@dataclass(frozen=True)
class RemoveAgent:
    """Kill the agent's process, so that none of its workers continues. It may restart."""

    agent: str
    why: str
    incarnation: str = ""


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


@dataclass(frozen=True)
class FinalizeCheckpoint:
    """All shards of `step` are durable: write the manifest. `records` are in rank order. Answer:
    `CheckpointFinalized`."""

    agent: str
    step: int
    attempt: int
    records: tuple[dict[str, Any], ...]
    incarnation: str = ""


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


@dataclass(frozen=True)
class CheckNode:
    """The agent runs the checks that precede the first use of a node. Answer: `NodeChecked`."""

    agent: str
    incarnation: str = ""


@dataclass(frozen=True)
class InjectFault:
    """The agent injects a fault that a user requested."""

    agent: str
    number: int
    fault: Injection
    incarnation: str = ""


@dataclass(frozen=True)
class Emit:
    """Append an event to the job's journal. The shell assigns its number and its time."""

    event: JobEvent


@dataclass(frozen=True)
class Stop:
    """End all workers of the agent, because the job has ended."""

    agent: str
    why: str
    incarnation: str = ""


@dataclass(frozen=True)
class End:
    """The job has ended. This is always the last effect; an ENDED event precedes it."""

    outcome: str  # SUCCEEDED | FAILED | CANCELLED | PAUSED
    code: str
    message: str
    traceback: str | None = None
    step: int = 0


Effect = (
    Fence
    | Form
    | WarmUp
    | SetPartners
    | FreeMemory
    | SetIntervals
    | Finish
    | Inspect
    | RemoveAgent
    | SaveShard
    | FinalizeCheckpoint
    | TidyRemoteTier
    | CheckNode
    | InjectFault
    | Emit
    | Stop
    | End
)
