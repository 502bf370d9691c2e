"""The response models of what a job has recorded: events, metrics, output, digests."""

from __future__ import annotations

from pydantic import ConfigDict, Field

from holdfast_service.job_model.log_levels import LogLevel
from holdfast_service.job_model.times import EventDocument, Time
from holdfast_service.views.view import View
from holdfast_workers.protocol.metrics import METRICS


class EventView(View):
    seq: int = Field(description="per job, from 1, without gaps")
    at: Time
    kind: str
    text: str = Field(default="", description="the event in a sentence, to be shown as it is")
    until: Time | None = Field(
        default=None,
        description="when that which it reports ends at the latest; null: no such time",
    )
    data: EventDocument


class MetricPoint(View):
    """`x-metrics` describes the values that every job has, in the order of their charts."""

    model_config = ConfigDict(
        json_schema_extra={"x-metrics": [vars(metric) for metric in METRICS.values()]}
    )
    step: int
    attempt: int
    at: Time
    values: dict[str, float | int | str | None]


class DiscardedView(View):
    """Steps of an attempt that a rollback discarded."""

    attempt: int
    points: tuple[MetricPoint, ...] = Field(description="ascending by step")


class LogLineView(View):
    line: int = Field(description="number of the line in the job, in order of arrival")
    at: Time
    rank: int | None
    attempt: int
    agent: str
    worker: str
    stream: str
    text: str
    level: LogLevel | None = Field(
        default=None, description="parsed from the text; null: not found"
    )


class DigestView(View):
    step: int
    digest: str = Field(description="digest of the whole state after the step")
