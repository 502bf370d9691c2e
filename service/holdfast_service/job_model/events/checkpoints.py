"""Events of the checkpoints in the remote tier, of damaged copies, and of save intervals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast_service.job_model.events.kinds import EventKind, JobEvent
from holdfast_service.placement.restore_points import BadCopy
from holdfast_service.policy.checkpoint_intervals import IntervalChoice


@dataclass(frozen=True, kw_only=True)
class CheckpointSavedEvent(JobEvent):
    """A checkpoint is durable."""

    kind = EventKind.CHECKPOINT_SAVED
    step: int
    attempt: int = 0
    tier: str = "remote"
    uri: str
    nbytes: int = 0
    mesh: Mapping[str, int] = field(default_factory=dict)
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    """The metrics of its step, as far as known."""


@dataclass(frozen=True, kw_only=True)
class CheckpointDeletedEvent(JobEvent):
    """A checkpoint was deleted, by retention or by a user."""

    kind = EventKind.CHECKPOINT_DELETED
    step: int
    uri: str
    why: str = ""


@dataclass(frozen=True)
class CorruptSince:
    """Every copy of what attempts up to `attempt` computed from `step` on."""

    attempt: int
    step: int


@dataclass(frozen=True, kw_only=True)
class CheckpointBadEvent(JobEvent):
    """Saved state is never restored again. At most one of `uri`, `copy` and `corrupt` names it;
    none does if the checkpoint was never completed."""

    kind = EventKind.CHECKPOINT_BAD
    omitted = frozenset({"copy", "corrupt"})
    step: int
    uri: str = ""
    """The checkpoint's address in the remote tier."""
    message: str = ""
    copy: BadCopy | None = None
    """A copy in memory."""
    corrupt: CorruptSince | None = None


@dataclass(frozen=True, kw_only=True)
class CheckpointVerifiedEvent(JobEvent):
    """All bytes of a checkpoint were verified for a user."""

    kind = EventKind.CHECKPOINT_VERIFIED
    step: int
    uri: str


@dataclass(frozen=True, kw_only=True)
class CheckpointPinnedEvent(JobEvent):
    """A user pinned a checkpoint: retention keeps it."""

    kind = EventKind.CHECKPOINT_PINNED
    step: int
    uri: str


@dataclass(frozen=True, kw_only=True)
class CheckpointUnpinnedEvent(JobEvent):
    """A user removed the pin of a checkpoint."""

    kind = EventKind.CHECKPOINT_UNPINNED
    step: int
    uri: str


@dataclass(frozen=True, kw_only=True)
class CheckpointIntervalEvent(JobEvent):
    """A tier's interval between two saves was chosen from measurements."""

    kind = EventKind.CHECKPOINT_INTERVAL
    merged = "choice"
    choice: IntervalChoice
    before: int
    """The previous interval."""


@dataclass(frozen=True, kw_only=True)
class DigestMismatchEvent(JobEvent):
    """A step was computed again, with another digest of its state."""

    kind = EventKind.DIGEST_MISMATCH
    step: int
    stored: str
    seen: str
    attempt: int
