"""What the control plane shows of a job's time."""

from __future__ import annotations

from pydantic import Field

from holdfast_service.views.jobs import View


class GoodputView(View):
    """Where the time went that a job was on the cluster, to the microsecond."""

    held_s: float = Field(description="time on the cluster; neither queued nor paused")
    by_kind_s: dict[str, float] = Field(
        description="sums to held_s: productive (in steps that are part of history), "
        "between_steps, replayed (in steps that had to be made again), starting, detection (from "
        "the last finished step to the first signal), recovery.<phase>, finishing"
    )
    goodput: float | None = Field(description="productive / held_s; null: nothing was held yet")
    effective_training_time_ratio: float | None = Field(
        description="(productive + between_steps) / held_s"
    )
    steps: int = Field(description="steps that are part of history")
    steps_replayed: int
    devices: int
    device_seconds_lost: float = Field(
        description="of steps made again, detection and recovery, times devices"
    )
    device_seconds_lost_by_incident: dict[int, float] = Field(
        description="the same, by number of the incident that cost it"
    )
    device_seconds_lost_otherwise: float = Field(
        description="what no incident tells of, as when a job begins again because all that it "
        "had on the cluster is gone; this and the incidents sum to device_seconds_lost"
    )
    final: bool = Field(description="the job has ended: nothing will change any more")
