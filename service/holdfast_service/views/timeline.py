"""The response models of a job's page: the verdict, and the timeline of its whole life."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from holdfast_service.views.jobs import JobView, View
from holdfast_service.views.ranks import RankHeatView


class VerdictView(View):
    """The situation of a job in plain sentences."""

    headline: str = Field(
        description="short, for example `Training` or `Recovering from a lost node`"
    )
    doing: str = Field(description="the present activity, in a sentence")
    last: str | None = Field(description="the last event; null: none yet")
    next: str | None = Field(description="the next step; null: none")
    eta_s: float | None
    goodput: float | None
    device_hours_used: float
    device_hours_lost: float
    fresh_at: float = Field(description="time of the supervisor's last report, or of the job's end")


class SpanKind(StrEnum):
    """The activity during a span of a job's life."""

    WAITING = "waiting"  # in the queue
    STARTING = "starting"  # on the cluster, before the first step
    PRODUCTIVE = "productive"  # in steps that are part of history, and between them
    DETECTING = "detecting"  # from the last finished step to the first signal of a fault
    RECOVERING = "recovering"
    RESTORING = "restoring"  # the part of a recovery that restores the state
    REPLAYING = "replaying"  # in steps that a rollback discarded
    FINISHING = "finishing"  # after the last step: the last checkpoint
    STOPPED = "stopped"  # paused


class SpanView(View):
    kind: SpanKind
    attempt: int | None = Field(
        description="the newest attempt at its start; null: none had formed"
    )
    since: float
    until: float
    incident: int | None = Field(description="number of the responsible incident; null: none")


class TimelineIncidentView(View):
    number: int
    at: float = Field(description="time of the first signal")
    closed_at: float | None
    cause: str
    decision: str | None


class TimelineCheckpointView(View):
    step: int
    at: float
    tier: str


class TimelineView(View):
    """Spans in order, without gaps or overlaps, from `since` to `until`; the spans on the cluster
    sum to the values of `/goodput`."""

    since: float
    until: float
    spans: tuple[SpanView, ...]
    incidents: tuple[TimelineIncidentView, ...]
    checkpoints: tuple[TimelineCheckpointView, ...]


class GlanceView(View):
    """The data that a job's page shows first."""

    job: JobView
    verdict: VerdictView
    timeline: TimelineView
    heat: RankHeatView
