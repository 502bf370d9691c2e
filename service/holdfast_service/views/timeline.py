"""What a job's page tells of its life: a verdict, and what every moment went into."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from holdfast_service.views.jobs import JobView, View
from holdfast_service.views.ranks import RankHeatView


class VerdictView(View):
    """How a job stands, in words made for reading."""

    headline: str = Field(description="a few words: `Training`, `Recovering from a lost node`")
    doing: str = Field(description="what it is doing now, one sentence")
    last: str | None = Field(description="the last thing that happened to it; null: nothing yet")
    next: str | None = Field(description="what comes next; null: nothing does")
    eta_s: float | None
    goodput: float | None
    device_hours_used: float
    device_hours_lost: float
    fresh_at: float = Field(description="when the job's supervisor was last heard, or the end")


class SpanKind(StrEnum):
    """What a stretch of a job's life was spent on."""

    WAITING = "waiting"  # in the queue
    STARTING = "starting"  # on the cluster, before the first step
    PRODUCTIVE = "productive"  # in steps that are part of history, and between them
    DETECTING = "detecting"  # from the last finished step to the first signal of a fault
    RECOVERING = "recovering"
    RESTORING = "restoring"  # the part of a recovery that brings the state back
    REPLAYING = "replaying"  # in steps that a rollback threw away: they are made again later
    FINISHING = "finishing"  # after the last step: its checkpoint
    STOPPED = "stopped"  # paused


class SpanView(View):
    kind: SpanKind
    attempt: int | None = Field(description="the newest at its beginning; null: none was formed")
    since: float
    until: float
    incident: int | None = Field(description="whose fault it was; null: no incident's")


class TimelineIncidentView(View):
    number: int
    at: float = Field(description="of its first signal")
    closed_at: float | None
    cause: str
    decision: str | None


class TimelineCheckpointView(View):
    step: int
    at: float
    tier: str


class TimelineView(View):
    """Spans in order, without gaps or overlaps, from `since` to `until`; those on the cluster sum
    to what `/goodput` tells."""

    since: float
    until: float
    spans: tuple[SpanView, ...]
    incidents: tuple[TimelineIncidentView, ...]
    checkpoints: tuple[TimelineCheckpointView, ...]


class GlanceView(View):
    """All that a page about a job shows first."""

    job: JobView
    verdict: VerdictView
    timeline: TimelineView
    heat: RankHeatView
