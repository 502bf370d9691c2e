"""Messages between a launcher and the program that it has started: a user's script or command.

A program that attaches connects to its launcher's socket (`programs/attachment.py`). The launcher
sends a `ProgramPlace` first; then both sides send as things happen.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import get_args

from holdfast_workers.protocol.messages import Restore
from holdfast_workers.protocol.processes import PartnerPresence, StateReply, StepReplicated

SOCKET_VARIABLE = "HOLDFAST_PROGRAM_SOCKET"
"""The environment variable with the name of the launcher's socket, in the abstract namespace. Every
process has it that a program executes."""

# --- from the launcher to the program -------------------------------------------------------------


@dataclass(frozen=True)
class ProgramPlace:
    """The program's place in its attempt, and where its memory checkpoints are."""

    job_id: str
    attempt: int
    rank: int
    world_size: int
    beacon: str
    """Path of the file in which it shows its progress."""
    segment_path: str
    """The rank's own segment."""
    restore: Restore
    """The state in memory that the attempt starts from; the tier INIT: none."""
    has_partner: bool = False
    stop_wanted: bool = False
    """Whether a stop was wanted before the program attached; see `StopWanted`."""
    start_bound_s: float = 0.0
    """How long it may show no sign of life before its first step; 0: as learned."""
    step_bound_s: float = 0.0
    """How long at least it may take for a step; 0: as learned."""


@dataclass(frozen=True)
class StopWanted:
    """The program is asked to save and to end, or its node is about to go."""


LauncherMessage = ProgramPlace | StopWanted | StateReply | StepReplicated | PartnerPresence
LAUNCHER_MESSAGES: tuple[type, ...] = get_args(LauncherMessage)

# --- from the program to the launcher -------------------------------------------------------------


@dataclass(frozen=True)
class Attached:
    """The program shows its progress in the beacon from now on."""

    integration: str = ""
    """The plug-in that attached: "lightning", "transformers", ...; "": the program itself."""


@dataclass(frozen=True)
class ProgramStep:
    """The program has applied a step."""

    step: int
    """Steps applied: 1 is the first."""
    at: float
    step_time_s: float
    """The time since the step that was reported before."""
    loss: float | None = None
    grad_norm: float | None = None
    lr: float | None = None
    tokens: int = 0
    """Tokens or samples that all ranks consumed in this step."""
    own: dict[str, float] = field(default_factory=dict)
    """Further metrics, by name."""


@dataclass(frozen=True)
class ProgramSaved:
    """The rank's segment contains this step."""

    step: int
    protected: int = -1
    """A step that the partners of every rank hold; -1: not known."""


@dataclass(frozen=True)
class StateTaken:
    """The program goes on from the state that its attempt starts from, which lies in its
    segment."""

    step: int


ProgramMessage = Attached | ProgramStep | ProgramSaved | StateTaken
PROGRAM_MESSAGES: tuple[type, ...] = get_args(ProgramMessage)
