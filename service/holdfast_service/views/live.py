"""The messages that only the live stream sends."""

from __future__ import annotations

from pydantic import Field

from holdfast_service.job_model.times import Time
from holdfast_service.views.history import MetricPoint
from holdfast_service.views.view import View


class LiveHello(View):
    """The first message of a stream: data fetched after it is at least as new as the stream."""

    server_time: Time


class LiveReset(View):
    """The stream cannot resume without a gap: the client must fetch everything again."""

    reason: str


class LiveRemoved(View):
    """An ended job was removed with its history."""

    id: str


class LiveMetrics(View):
    points: tuple[MetricPoint, ...] = Field(description="ascending; steps repeat after a rollback")


class LiveLogs(View):
    """New log lines are available at `/logs`."""

    last_line: int
