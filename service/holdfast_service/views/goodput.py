"""The response model of a job's goodput account."""

from __future__ import annotations

from pydantic import Field

from holdfast_service.views.view import View


class GoodputView(View):
    """How a job's time on the cluster was spent, to the microsecond. A device-second is a second of
    one rank: each moment counts at the world size of that moment."""

    held_s: float = Field(
        description="time on the cluster, neither queued nor paused; without the times in which "
        "nothing of the job ran, as shown by `job.away`; of a live job up to the last report"
    )
    by_kind_s: dict[str, float] = Field(
        description="sums to held_s: productive (in steps that are part of history), "
        "between_steps, no_step (the ranks run, and no step of this time is known, or not yet), "
        "replayed (in steps that were computed again), starting, detection (from the last "
        "finished step to the first signal), recovery.<phase>, finishing (after the last step)"
    )
    device_seconds_held: float = Field(description="device-seconds on the cluster")
    device_seconds_by_kind: dict[str, float] = Field(
        description="the kinds of by_kind_s in device-seconds; sums to device_seconds_held"
    )
    goodput: float | None = Field(
        description="productive device-seconds / device_seconds_held; null: no time on the "
        "cluster, or a program that has reported no step"
    )
    effective_training_time_ratio: float | None = Field(
        description="the same for productive + between_steps"
    )
    steps: int = Field(description="steps that are part of history")
    steps_replayed: int
    devices: int = Field(description="ranks of the newest world")
    device_seconds_lost: float = Field(
        description="device-seconds in repeated steps, detection and recovery"
    )
    device_seconds_lost_by_incident: dict[int, float] = Field(
        description="the same, by number of the responsible incident"
    )
    device_seconds_lost_otherwise: float = Field(
        description="losses without an incident, for example when a job starts again because its "
        "whole cluster was lost; this and the incidents sum to device_seconds_lost"
    )
    final: bool = Field(description="the job has ended and these values are final")
