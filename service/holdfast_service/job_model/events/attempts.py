"""Events of an attempt: forming, running, ended, its memory checkpoints and its standbys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast_service.job_model.attempt_parts import FoundState, JoinTimes, StandbyAgent
from holdfast_service.job_model.events.kinds import EventKind, JobEvent
from holdfast_service.placement.memory_protection import MemoryProtection


@dataclass(frozen=True, kw_only=True)
class SeatedRank:
    """The place of one rank in an attempt."""

    rank: int
    worker: str | None = None
    """The worker's name; None until the forked process has reported it."""
    agent: str = ""
    incarnation: str = ""
    node_id: str = ""
    host: str = ""
    pid: int | None = None
    role: str = ""
    """Where the rank's process came from: "first", "kept", "replaced", "forked" or "standby"; of a
    program, which every attempt starts again, "restarted" in place of "kept"."""
    partners: tuple[str, ...] = ()
    """The agents that keep its memory checkpoints."""


@dataclass(frozen=True, kw_only=True)
class RestorePlan:
    """The state that an attempt starts from, and the saved states that were found."""

    step: int = 0
    attempt: int = 0
    """The attempt that computed the state; 0: not known, or no attempt did."""
    tiers: Mapping[int, str] = field(default_factory=dict)
    """Rank → tier."""
    sources: Mapping[int, str] = field(default_factory=dict)
    """Rank → agent or URI."""
    is_own: bool = False
    """Whether the program may load a checkpoint of its own: Holdfast restores nothing."""
    newest: Mapping[str, int] = field(default_factory=dict)
    """Tier → the newest step that it could restore."""
    found: tuple[FoundState, ...] = ()
    """Newest first."""


@dataclass(frozen=True, kw_only=True)
class AttemptFormingEvent(JobEvent):
    """An attempt was announced: its ranks, and the state that they restore."""

    kind = EventKind.ATTEMPT_FORMING
    attempt: int
    mesh: Mapping[str, int]
    world_size: int
    members: tuple[SeatedRank, ...]
    standbys: tuple[StandbyAgent, ...] = ()
    restore: RestorePlan = RestorePlan()
    cause_incident: int | None = None
    """The open incident; None: the job starts."""


@dataclass(frozen=True, kw_only=True)
class AttemptRunningEvent(JobEvent):
    """An attempt has committed its first step."""

    kind = EventKind.ATTEMPT_RUNNING
    attempt: int
    members: tuple[SeatedRank, ...] = ()
    """The ranks with their final processes."""
    joined: Mapping[int, JoinTimes] = field(default_factory=dict)
    """Rank → times."""
    first_step: int | None = None


@dataclass(frozen=True, kw_only=True)
class AttemptEndedEvent(JobEvent):
    """An attempt has ended; its number is never used again."""

    kind = EventKind.ATTEMPT_ENDED
    omitted = frozenset({"tokens_per_s"})
    attempt: int
    reason: str = ""
    last_step: int | None = None
    gone: tuple[tuple[str, str], ...] = ()
    """(agent, incarnation) of agents that are known to have ended."""
    tokens_per_s: float | None = None
    """Median throughput of its newest steps; None: not measured."""


@dataclass(frozen=True, kw_only=True)
class InitialisedFromEvent(JobEvent):
    """The job's first attempt took its state from a given checkpoint."""

    kind = EventKind.INITIALISED_FROM
    attempt: int
    uri: str
    step: int
    """The step from which the job continues."""
    what: str
    """The part of the checkpoint that was taken."""


@dataclass(frozen=True, kw_only=True)
class ProgramResumedEvent(JobEvent):
    """The first step that a program reports in an attempt."""

    kind = EventKind.PROGRAM_RESUMED
    attempt: int
    restored_step: int | None
    """The step that it went on from; None: not known, as it may not report each step."""
    first_step: int
    steps_lost: int | None = None
    """Steps that it computes again; None: not known."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlacedEvent(JobEvent):
    """The losses that the memory checkpoints of an attempt protect against from now on."""

    kind = EventKind.MEMORY_PLACED
    merged = "protection"
    attempt: int
    protection: MemoryProtection


@dataclass(frozen=True, kw_only=True)
class ProgramAttachedEvent(JobEvent):
    """The user's program of an attempt works with Holdfast, beyond being launched."""

    kind = EventKind.PROGRAM_ATTACHED
    attempt: int
    level: int
    """1: it reports its steps. 2: it also keeps checkpoints in memory."""
    integration: str = ""
    """The plug-in that attached; "": the program itself."""


@dataclass(frozen=True, kw_only=True)
class StandbyEvent(JobEvent):
    """A standby agent has changed."""

    kind = EventKind.STANDBY
    agent: str
    state: str
    """The agent's state: "warming", "ready", "checking", "unfit" or "lost"."""
