"""The response models of incidents: evidence, decision and cost."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import Field

from holdfast_service.job_model.times import Time
from holdfast_service.policy.incident_parts import (
    EarlierRecovery,
    LostItem,
    RefusedDecision,
    SharedStack,
    SuspectedRank,
)
from holdfast_service.views.view import View


class BudgetView(View):
    """The use of a job's failure budget at the time of a decision."""

    failures: int
    max_failures: int
    failures_left: int
    preemptions: int = Field(description="attempts that ended by preemption")
    max_preemptions: int
    without_progress: int = Field(description="attempts in a row without a new step")
    max_without_progress: int
    window_s: float


class MeshChangeView(View):
    """A change of the mesh: the world shrank or grew, after a fault or because it was to."""

    before: dict[str, int]
    after: dict[str, int]
    ranks_before: int
    ranks_after: int


class SentenceSubject(StrEnum):
    """What a sentence about an incident is about, in the order in which they are read."""

    LOSS = "loss"
    EVIDENCE = "evidence"
    SUSPECT = "suspect"
    STACK = "stack"
    EARLIER = "earlier"
    DECISION = "decision"
    MESH = "mesh"
    REFUSED = "refused"
    BUDGET = "budget"
    RESTORE = "restore"
    PHASES = "phases"
    END = "end"


class IncidentSentence(View):
    about: str = Field(description="a `SentenceSubject`; a newer server may send others")
    text: str


class IncidentView(View):
    """One fault, or one resize, from its first signal to the first step of the next attempt."""

    number: int
    title: str = Field(default="", description="the fault in a clause: `a node was lost`")
    text: tuple[IncidentSentence, ...] = Field(
        default=(), description="the incident in sentences, to be shown as they are"
    )
    cause: str = Field(
        description="the root cause among `causes`; `resize`: nothing failed, another mesh was due"
    )
    causes: tuple[str, ...] = ()
    attempt: int
    lost: tuple[LostItem, ...]
    evidence: tuple[str, ...] = Field(
        description="all signals of the incident, in order of arrival"
    )
    suspects: tuple[SuspectedRank, ...] = Field(
        default=(), description="ranks that may have caused the incident, the most likely first"
    )
    stacks: tuple[SharedStack, ...] = Field(
        default=(), description="for a hang: ranks with equal stacks share an entry"
    )
    decision: str | None
    reason: str | None
    refused: tuple[RefusedDecision, ...] = Field(
        default=(),
        description="all other decisions, the cheapest first, with the rejection reason",
    )
    budget: BudgetView | None = Field(default=None, description="null: no decision yet")
    attempts_lost: int = Field(default=0, description="number of attempts that the incident ended")
    mesh_change: MeshChangeView | None = Field(
        default=None, description="the change of the mesh because of it; null: none"
    )
    earlier: tuple[EarlierRecovery, ...] = Field(
        default=(), description="decisions of this incident that a further fault made void"
    )
    level: int = Field(
        default=3, description="the level of the job's program then; it decides what can be known"
    )
    restored_step: int | None = Field(
        description="step that the next attempt went on from; null: not known"
    )
    steps_lost: int | None = Field(description="steps computed again; null: not known")
    device_seconds_lost: float | None = Field(
        default=None,
        description="from the goodput account (`/goodput`): detection, recovery and repeated "
        "steps; null: not final yet, as no step after it is stored",
    )
    cost: str = Field(
        default="", description="the same as it is shown, `2.7 device-seconds`; empty: null or zero"
    )
    tiers: dict[str, str] = Field(
        description="rank -> tier of the state that Holdfast restored, or offered to a program"
    )
    phases_s: dict[str, float | None]
    signalled_at: Time | None = Field(default=None, description="time of the first signal")
    opened_at: Time
    closed_at: Time | None
    resolution: str | None
    end_code: str | None = Field(
        default=None, description="outcome code of the job, if it ended with this incident"
    )


class FaultView(View):
    """A fault injected by a user."""

    number: int = Field(description="per job, from 1, without gaps")
    kind: str
    fault: dict[str, Any] = Field(
        description="the requested fault, including a randomly chosen rank"
    )
    requested_at: Time
    injected_at: Time | None = Field(
        description="time at which the job's supervisor accepted it; a fault with a step or phase "
        "waits for it there. null: not yet"
    )
