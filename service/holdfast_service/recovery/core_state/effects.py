"""All that the recovery core can ask for. The shell carries them out in the order given.

Commands to different agents may go out in parallel; `Emit`s keep their order, and an `Emit` that
precedes a command must be in the journal before the command leaves.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_workers.fault_injection.kinds import Injection
from holdfast_workers.protocol.messages import FormOrder, Partner, Place


@dataclass(frozen=True)
class Fence:
    """Announce `attempt`; park or kill the agent's workers of older ones; answer `Fenced`."""

    agent: str
    attempt: int
    incarnation: str = ""
    condemned: tuple[str, ...] = ()
    """Workers that are known not to leave by themselves: to be killed at once."""


@dataclass(frozen=True)
class Form:
    """Bring up the seats of `order`. Workers of the agent that it does not name are not needed
    any more and are to be stopped, so that no process stays beside the capacity."""

    agent: str
    order: FormOrder
    incarnation: str = ""

    @property
    def attempt(self) -> int:
        return self.order.attempt


@dataclass(frozen=True)
class WarmUp:
    """The agent holds no rank of `attempt`: keep its zygote up and its warm workers forked."""

    agent: str
    attempt: int
    incarnation: str = ""


@dataclass(frozen=True)
class SetPartners:
    """From now on the rank on `agent` replicates to all of `partners`."""

    agent: str
    attempt: int
    rank: int
    partners: tuple[Partner, ...]
    incarnation: str = ""


@dataclass(frozen=True)
class FreeMemory:
    """The agent is to keep memory checkpoints of these ranks of this mesh only: as its own, and
    for others."""

    agent: str
    attempt: int
    mesh: dict[str, int]
    own: frozenset[int]
    replicas: frozenset[int]
    incarnation: str = ""


@dataclass(frozen=True)
class SetIntervals:
    """Let rank 0 on the agent bring to the agreement how often all save, in steps."""

    agent: str
    attempt: int
    memory: int
    remote: int
    incarnation: str = ""


@dataclass(frozen=True)
class Finish:
    """Let the agent's ranks of `attempt` wish to stop: after the next agreed step all do, save it
    to the remote tier, and are done."""

    agent: str
    attempt: int
    incarnation: str = ""


@dataclass(frozen=True)
class Inspect:
    """Tell what is seen, from outside, of the agent's ranks of `attempt`; answer `Inspected`."""

    agent: str
    attempt: int
    number: int
    """Of the look, to tell its answers from those to an earlier one."""
    incarnation: str = ""


@dataclass(frozen=True)
class RemoveAgent:
    """Kill the agent's process, so that nothing of it can go on; let it restart if it can."""

    agent: str
    why: str
    incarnation: str = ""


@dataclass(frozen=True)
class SaveShard:
    """Save the rank's shard of `step`, as `attempt` computed it, to the remote tier: from the
    agent's memory at `place`, because nobody else saves it any more."""

    agent: str
    rank: int
    place: Place
    attempt: int
    step: int
    incarnation: str = ""


@dataclass(frozen=True)
class FinalizeCheckpoint:
    """All shards of `step` are durable: write the manifest. `records` by rank."""

    agent: str
    step: int
    attempt: int
    records: tuple[dict[str, Any], ...]
    incarnation: str = ""


@dataclass(frozen=True)
class TidyRemoteTier:
    """Put into quarantine what is bad, then apply retention; a `tidied` signal with `step` tells
    how it went. What is to be published yet, as (step, attempt), stays."""

    agent: str
    attempt: int
    step: int
    unfinished: tuple[tuple[int, int], ...]
    bad: frozenset[str]
    incarnation: str = ""


@dataclass(frozen=True)
class CheckNode:
    """The agent is to check its node as before its first use."""

    agent: str
    incarnation: str = ""


@dataclass(frozen=True)
class InjectFault:
    """The agent is to bring about a fault that somebody wants."""

    agent: str
    number: int
    fault: Injection
    incarnation: str = ""


@dataclass(frozen=True)
class Emit:
    """Append an event to the job's journal; the shell gives number and time."""

    kind: EventKind
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Stop:
    """End all workers of the agent; the job is over."""

    agent: str
    why: str
    incarnation: str = ""


@dataclass(frozen=True)
class End:
    """The job has ended; always the last effect ever. The ENDED event was emitted before it."""

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
