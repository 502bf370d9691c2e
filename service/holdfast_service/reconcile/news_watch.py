"""Waits for news of one job's supervisor, so that its polls are a safety net only.

The call waits at the supervisor and costs nothing meanwhile. A supervisor that does not answer is
found by the polls.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from holdfast_service.job_model.supervisor_protocol import (
    Cluster,
    ClusterUnavailable,
    Cursors,
    SupervisorUnavailable,
)

WAIT_S = 600.0
MIN_INTERVAL_S = 0.2
"""Least time between two polls of a job because of news: an incident is several events in a row."""


class NewsWatch:
    """Waits for a supervisor's news, with one outstanding call at a time."""

    def __init__(
        self,
        cluster: Cluster,
        job_id: str,
        on_news: Callable[[], None],
        delay_s: Callable[[], float],
    ) -> None:
        """`on_news()` polls the job at once; `delay_s()`: by how much that must be delayed now."""
        self._cluster = cluster
        self._job_id = job_id
        self._on_news = on_news
        self._delay_s = delay_s
        self._waiting: asyncio.Task[None] | None = None
        self._told_at = 0.0

    def start(self, stored: Cursors) -> None:
        """Wait for news after `stored`, unless a call waits already."""
        if self._waiting is None or self._waiting.done():
            self._waiting = asyncio.create_task(self._wait(stored), name=f"news of {self._job_id}")

    async def close(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            await asyncio.gather(self._waiting, return_exceptions=True)

    async def _wait(self, stored: Cursors) -> None:
        try:
            if not await self._cluster.await_news(self._job_id, stored, WAIT_S):
                return
        except (ClusterUnavailable, SupervisorUnavailable):
            return
        earliest = self._told_at + MIN_INTERVAL_S - time.monotonic()
        await asyncio.sleep(max(earliest, self._delay_s()))
        self._told_at = time.monotonic()
        self._on_news()
