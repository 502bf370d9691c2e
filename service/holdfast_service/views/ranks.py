"""The response models of single ranks: location, speed and history."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from holdfast_service.job_model.times import Time
from holdfast_service.views.view import View


class RankMeasure(StrEnum):
    """The measure of a rank history."""

    COMPUTE_S = "compute_s"  # compute seconds per step, without waiting for other ranks
    STEP_S = "step_s"  # seconds per whole step, equal for all ranks
    LAG = "lag"  # compute seconds per step beyond the fastest rank


class RankView(View):
    """The present state of a rank."""

    rank: int
    node: str = Field(description="name of its node, as in `/nodes`; empty: not known")
    host: str
    agent: str
    worker: str
    pid: int | None = Field(description="its process on that host; null: not known")
    role: str
    step: int | None = Field(description="its current step, from its beacon; null: not known")
    phase: str | None = Field(description="phase of the step; null: not known")
    lag_steps: int | None = Field(
        description="steps behind the most advanced rank; null: its step is not known"
    )
    step_time_s: float | None = Field(
        description="compute time of its last steps, without waiting for other ranks"
    )
    slow_factor: float | None = Field(
        description="its step time over the median of all ranks'; null: not known"
    )
    silent_s: float | None = Field(description="time since its beacon last changed, as of `at`")
    coordinates: dict[str, int] = Field(description="mesh axis -> coordinate")


class RanksView(View):
    at: Time | None = Field(description="time of the report; null: none yet")
    attempt: int
    front_step: int | None = Field(
        description="step of the most advanced rank; null: no rank's step is known"
    )
    ranks: tuple[RankView, ...] = Field(description="ranks of the newest attempt, ascending")


class HistoryRankView(View):
    rank: int
    node: str
    workers: tuple[str, ...] = Field(
        description="workers that ran the rank in this time, oldest first"
    )


class RankHistoryView(View):
    """A value per rank and time bucket; null where the rank made no step."""

    of: RankMeasure
    since: Time
    until: Time
    bucket_s: float
    ranks: tuple[HistoryRankView, ...]
    values: tuple[tuple[float | None, ...], ...] = Field(
        description="one row per entry of `ranks`, one value per bucket: the mean where "
        "several steps fall into it"
    )


class RankHeatView(View):
    """The history of ranks in packed form for a heatmap, which may have a hundred thousand values
    and more."""

    of: RankMeasure
    since: Time
    until: Time
    bucket_s: float
    buckets: int
    ranks: tuple[int, ...] = Field(description="ascending")
    nodes: tuple[str, ...] = Field(description="names of nodes; empty: not known")
    node_of: tuple[int, ...] = Field(
        description="per entry of `ranks`: index of its last node in `nodes`"
    )
    values: str = Field(
        description="base64 of half-precision floats, little-endian: one row per entry of `ranks`, "
        "one value per bucket; NaN where the rank made no step"
    )


class RankWorkerView(View):
    """A process that ran the rank in an attempt."""

    attempt: int
    worker: str
    agent: str
    node: str
    host: str
    pid: int | None
    since: Time
    until: Time | None = Field(description="null: it runs the rank now")


class RankStackView(View):
    """The stack of the rank, as recorded by an incident."""

    incident: int
    at: Time
    frames: tuple[str, ...] = Field(description="the innermost first")


class RankDetailView(View):
    rank: int
    now: RankView | None = Field(description="null: the rank is not in the newest attempt")
    workers: tuple[RankWorkerView, ...] = Field(description="newest first, 200 at most")
    stacks: tuple[RankStackView, ...] = Field(description="newest first, 20 at most")
    incidents: tuple[int, ...] = Field(description="incidents that involved the rank, newest first")
    memory_bytes: int | None = Field(description="memory of its process; null: not known")
