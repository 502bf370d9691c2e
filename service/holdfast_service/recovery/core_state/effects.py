"""Effects: the complete set of requests that the recovery core makes to its shell.

The shell (`supervisor/supervisor.py`) executes effects in the order in which the core returned
them. Contract:

- Commands to different agents may be sent in parallel.
- `Emit` effects keep their order. An `Emit` that precedes a command must be in the journal before
  the command is sent.
- Commands are those of `holdfast_workers/protocol/commands.py`. Each names its agent and the
  `incarnation` of the agent that it is meant for.
- Each command ends in its answer (see `inputs.py`) or in `CommandFailed`.
- `End` is the last effect of a job.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_service.job_model.events.kinds import JobEvent
from holdfast_workers.protocol.commands import Command


@dataclass(frozen=True)
class RemoveAgent:
    """Kill this process of the agent if it lives, so that none of its workers continues. The agent
    restarts."""

    agent: str
    why: str
    incarnation: str = ""


@dataclass(frozen=True)
class KeepSeats:
    """An elastic job keeps these seats and asks for no others; None: it asks for all its seats. The
    agents of the other seats end, and their nodes are free for other jobs."""

    seats: frozenset[str] | None


@dataclass(frozen=True)
class Emit:
    """Append an event to the job's journal. The shell assigns its number and its time."""

    event: JobEvent


@dataclass(frozen=True)
class End:
    """The job has ended. This is always the last effect; an ENDED event precedes it."""

    outcome: str  # SUCCEEDED | FAILED | CANCELLED | PAUSED
    code: str
    message: str
    traceback: str | None = None
    step: int = 0


Effect = Command | RemoveAgent | KeepSeats | Emit | End
