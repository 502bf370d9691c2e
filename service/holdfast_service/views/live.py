"""What the live stream tells beside what other calls return too."""

from __future__ import annotations

from pydantic import Field

from holdfast_service.views.jobs import MetricPoint, View


class LiveHello(View):
    """The first message of a stream: what is fetched after it is not older than the stream."""

    server_time: float


class LiveReset(View):
    """The stream cannot be resumed without a gap: fetch everything anew."""

    reason: str


class LiveMetrics(View):
    points: tuple[MetricPoint, ...] = Field(description="ascending; a rollback makes steps again")


class LiveLogs(View):
    """There are new log lines; `/logs` has them."""

    last_line: int
