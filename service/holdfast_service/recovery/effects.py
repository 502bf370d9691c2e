"""All that the recovery core can ask for. The shell carries them out in the order given.

Commands to different agents may go out in parallel; `Emit`s keep their order, and an `Emit` that
precedes a command must be in the journal before the command leaves.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from holdfast_service.reports import EventKind
from holdfast_workers.messages import FormOrder, Partner


@dataclass(frozen=True)
class Fence:
    """Announce `attempt`; park or kill the agent's workers of older ones; answer `Fenced`."""

    agent: str
    attempt: int
    incarnation: str = ""


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
class SetPartner:
    """From now on the rank on `agent` replicates to `partner` (None: to nobody)."""

    agent: str
    attempt: int
    rank: int
    partner: Partner | None
    incarnation: str = ""


@dataclass(frozen=True)
class RemoveAgent:
    """Kill the agent's process, so that nothing of it can go on; let it restart if it can."""

    agent: str
    why: str
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

    outcome: str  # SUCCEEDED | FAILED | CANCELLED
    code: str
    message: str
    traceback: str | None = None
    step: int = 0


Effect = Fence | Form | WarmUp | SetPartner | RemoveAgent | FinalizeCheckpoint | Emit | Stop | End
