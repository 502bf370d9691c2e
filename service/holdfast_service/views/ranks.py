"""What is shown of single ranks: where they are, how fast they compute, since when."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from holdfast_service.views.jobs import View


class RankMeasure(StrEnum):
    """What a history of ranks tells of each."""

    COMPUTE_S = "compute_s"  # seconds of a step without any waiting for others
    STEP_S = "step_s"  # seconds of a whole step: of all ranks alike
    LAG = "lag"  # seconds of a step beyond the fastest rank's, that others wait for


class RankView(View):
    """A rank as it stands now."""

    rank: int
    node: str = Field(description="name of its node, as in `/nodes`; empty: not known")
    host: str
    agent: str
    worker: str
    role: str
    step: int | None = Field(description="that it is in, as its beacon says; null: not known")
    phase: str | None = Field(description="of the step; null: not known")
    lag_steps: int | None = Field(description="behind the rank that has come furthest")
    step_time_s: float | None = Field(description="of its last steps, without waiting for others")
    slow_factor: float | None = Field(
        description="its step time over the median of all ranks'; null: not known"
    )
    silent_s: float | None = Field(description="since its beacon last changed, at `at`")
    coordinates: dict[str, int] = Field(description="axis of the mesh -> place on it")


class RanksView(View):
    at: float | None = Field(description="when the ranks were looked at; null: never yet")
    attempt: int
    front_step: int | None = Field(description="of the rank that has come furthest")
    ranks: tuple[RankView, ...] = Field(description="of the newest attempt, ascending")


class HistoryRankView(View):
    rank: int
    node: str
    workers: tuple[str, ...] = Field(description="that had the rank in this time, oldest first")


class RankHistoryView(View):
    """A value for each rank and bucket of time; null where the rank made no step."""

    of: RankMeasure
    since: float
    until: float
    bucket_s: float
    ranks: tuple[HistoryRankView, ...]
    values: tuple[tuple[float | None, ...], ...] = Field(
        description="one row per entry of `ranks`, one value per bucket: the mean where "
        "several steps fall into it"
    )


class RankHeatView(View):
    """The same for a picture: packed, for there may be a hundred thousand values and more."""

    of: RankMeasure
    since: float
    until: float
    bucket_s: float
    buckets: int
    ranks: tuple[int, ...] = Field(description="ascending")
    nodes: tuple[str, ...] = Field(description="names of nodes; empty: not known")
    node_of: tuple[int, ...] = Field(description="by entry of `ranks`: the last place in `nodes`")
    values: str = Field(
        description="base64 of half-precision floats, little-endian: one row per entry of `ranks`, "
        "one value per bucket; NaN where the rank made no step"
    )


class RankWorkerView(View):
    """A process that had the rank in one attempt."""

    attempt: int
    worker: str
    agent: str
    node: str
    host: str
    pid: int | None
    since: float
    until: float | None = Field(description="null: it has it now")


class RankStackView(View):
    """Where the rank stood when an incident looked."""

    incident: int
    at: float
    frames: tuple[str, ...] = Field(description="the innermost first")


class RankDetailView(View):
    rank: int
    now: RankView | None = Field(description="null: the newest attempt has no such rank")
    workers: tuple[RankWorkerView, ...] = Field(description="newest first, 200 at most")
    stacks: tuple[RankStackView, ...] = Field(description="newest first, 20 at most")
    incidents: tuple[int, ...] = Field(description="that it had a part in, newest first")
    memory_bytes: int | None = Field(description="of its process; null: not known")
