"""The response models of an attempt: its ranks, standbys and restored state."""

from __future__ import annotations

from pydantic import Field

from holdfast_service.job_model.times import Time
from holdfast_service.views.view import View


class MemberView(View):
    """One rank of an attempt."""

    rank: int
    worker: str
    agent: str
    node_id: str
    host: str
    pid: int | None
    role: str


class OddsView(View):
    probability: float
    standard_error: float = Field(description="0: exact")


class MemoryProtectionView(View):
    """The failures that memory checkpoints survive, given the present partners."""

    copies: int = Field(description="copies wanted on other nodes")
    partners: dict[int, tuple[str, ...]] = Field(
        description="rank -> agents that hold its copies; empty where replicas replace copies"
    )
    recoverable: dict[int, OddsView] = Field(
        description="k -> probability that training continues from memory when k of the nodes that "
        "hold state are lost at once"
    )
    unprotected: tuple[str, ...] = Field(
        description="groups, domains and nodes whose loss would lose state, with the reason"
    )


class SpareWorkerView(View):
    """A warm process on a standby."""

    worker: str
    pid: int | None = None


class StandbyView(View):
    """An agent without ranks in an attempt."""

    agent: str
    node_id: str = ""
    host: str = ""
    workers: tuple[SpareWorkerView, ...] = ()


class FoundStateView(View):
    """A saved state that was found when an attempt formed."""

    tier: str
    step: int
    attempt: int = 0
    mesh: str = ""
    complete: bool = True
    missing: tuple[tuple[int, ...], ...] = Field(
        default=(),
        description="ranks without a copy; ranks of which one copy would be enough are grouped",
    )


class RestoreView(View):
    """The state that an attempt starts from."""

    step: int | None = Field(default=None, description="null: not known")
    attempt: int = Field(default=0, description="the attempt that computed it; 0: none, or unknown")
    tiers: dict[str, str] = Field(default={}, description="rank -> tier")
    sources: dict[str, str] = Field(default={}, description="rank -> agent or URI")
    newest: dict[str, int] = Field(
        default={}, description="tier -> newest step that it could restore"
    )
    found: tuple[FoundStateView, ...] = Field(
        default=(), description="available saved states, newest first"
    )


class JoinView(View):
    """How a rank joined an attempt."""

    phases_s: dict[str, float] = Field(default={}, description="phase -> seconds")


class AttemptView(View):
    number: int
    state: str = Field(description="forming, running or ended")
    mesh: dict[str, int]
    world_size: int
    members: tuple[MemberView, ...]
    standbys: tuple[StandbyView, ...]
    restore: RestoreView
    cause_incident: int | None
    joined: dict[str, JoinView] = Field(description="by rank")
    memory_protection: MemoryProtectionView | None = Field(
        default=None, description="null: not known yet"
    )
    first_step: int | None
    last_step: int | None
    forming_at: Time
    running_at: Time | None
    ended_at: Time | None
    reason: str | None = Field(description="why the attempt ended")
