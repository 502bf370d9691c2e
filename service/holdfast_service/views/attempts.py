"""The response models of an attempt: its ranks, standbys and restored state."""

from __future__ import annotations

from pydantic import Field

from holdfast_service.job_model.attempt_parts import FoundState, JoinTimes, StandbyAgent
from holdfast_service.job_model.times import Time
from holdfast_service.placement.memory_protection import MemoryProtection
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


class RestoreView(View):
    """The state that an attempt starts from."""

    step: int | None = Field(default=None, description="null: not known")
    attempt: int = Field(default=0, description="the attempt that computed it; 0: none, or unknown")
    tiers: dict[str, str] = Field(default={}, description="rank -> tier")
    sources: dict[str, str] = Field(default={}, description="rank -> agent or URI")
    newest: dict[str, int] = Field(
        default={}, description="tier -> newest step that it could restore"
    )
    found: tuple[FoundState, ...] = Field(
        default=(), description="available saved states, newest first"
    )


class AttemptView(View):
    number: int
    state: str = Field(description="forming, running or ended")
    mesh: dict[str, int]
    world_size: int
    members: tuple[MemberView, ...]
    standbys: tuple[StandbyAgent, ...]
    restore: RestoreView
    cause_incident: int | None
    joined: dict[str, JoinTimes] = Field(description="by rank")
    memory_protection: MemoryProtection | None = Field(
        default=None, description="null: not known yet"
    )
    first_step: int | None
    last_step: int | None
    forming_at: Time
    running_at: Time | None
    ended_at: Time | None
    reason: str | None = Field(description="why the attempt ended")
