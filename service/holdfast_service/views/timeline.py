"""The response models of a job's page: the verdict, and the timeline of its whole life."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from holdfast_service.job_model.times import Time
from holdfast_service.views.incidents import MeshChangeView
from holdfast_service.views.jobs import JobView
from holdfast_service.views.ranks import RankHeatView
from holdfast_service.views.view import View


class VerdictView(View):
    """The situation of a job in plain sentences."""

    headline: str = Field(
        description="short, for example `Training` or `Recovering from a lost node`"
    )
    doing: str = Field(description="the present activity, in a sentence")
    last: str | None = Field(
        description="the last event; of an ended job, the faults that it survived, with what was "
        "lost to them; null: none yet"
    )
    next: str | None = Field(
        description="the next step; of an ended job, where its result lies; null: none"
    )
    eta_s: float | None
    goodput: float | None
    device_hours_used: float
    device_hours_lost: float
    fresh_at: Time = Field(description="time of the supervisor's last report, or of the job's end")

    @property
    def lines(self) -> tuple[str, ...]:
        """The sentences in order. Of an ended job: how it ended, the faults that it survived with
        what was lost to them, and where its result lies."""
        return tuple(filter(None, (self.doing, self.last, self.next)))


class SpanKind(StrEnum):
    """The activity during a span of a job's life."""

    WAITING = "waiting"  # in the queue
    STARTING = "starting"  # on the cluster, before the first step
    PRODUCTIVE = "productive"  # in steps that are part of history, and between them
    DETECTING = "detecting"  # from the last finished step to the first signal of a fault
    RECOVERING = "recovering"
    RESTORING = "restoring"  # the part of a recovery that restores the state
    RUNNING = "running"  # the ranks run, and no step of this time is known, or not yet
    AWAY = "away"  # nothing of the job ran, or its supervisor has not reported since
    REPLAYING = "replaying"  # in steps that a rollback discarded
    FINISHING = "finishing"  # after the last step, until the end: the last checkpoint
    STOPPED = "stopped"  # paused


class SpanView(View):
    kind: SpanKind
    attempt: int | None = Field(
        description="the newest attempt at its start; null: none had formed"
    )
    since: Time
    until: Time
    incident: int | None = Field(description="number of the responsible incident; null: none")


class WorldPeriodView(View):
    """A period on the cluster with one mesh. A mesh counts from the begin of its attempt; the first
    of a stay on the cluster from the begin of that stay."""

    since: Time
    until: Time
    mesh: dict[str, int]
    world_size: int = Field(description="number of ranks")
    nodes: int = Field(description="nodes with ranks, standby nodes not counted")


class TimelineIncidentView(View):
    number: int
    at: Time = Field(description="time of the first signal")
    closed_at: Time | None
    cause: str
    decision: str | None
    mesh_change: MeshChangeView | None = Field(
        default=None, description="the change of the mesh because of it; null: none"
    )


class TimelineCheckpointView(View):
    step: int
    at: Time
    tier: str


class TimelineView(View):
    """Spans in order, without gaps or overlaps, from `since` to `until`; the spans on the cluster
    sum to the values of `/goodput`."""

    since: Time
    until: Time
    spans: tuple[SpanView, ...]
    worlds: tuple[WorldPeriodView, ...] = Field(
        default=(),
        description="the meshes of the job over time, in order; none while no attempt has formed "
        "and while the job is off the cluster",
    )
    incidents: tuple[TimelineIncidentView, ...]
    checkpoints: tuple[TimelineCheckpointView, ...]


class GlanceView(View):
    """The data that a job's page shows first."""

    job: JobView
    verdict: VerdictView
    timeline: TimelineView
    heat: RankHeatView
