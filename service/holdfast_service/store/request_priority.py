"""Tracks in-flight requests and watched jobs, so that background work yields to users.

Background work waits briefly until no request is in flight. A job that a live stream watches is
polled more often.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator


class ActiveRequests:
    """Counts the requests without a response, and knows which jobs are watched. One instance per
    process, used in its event loop only."""

    def __init__(self) -> None:
        self.on_watch_started: Callable[[str], None] = lambda job_id: None
        """Called when the first watcher of a job arrives."""
        self._watched: set[str] = set()
        self._count = 0
        self._idle: asyncio.Event | None = None  # set only while a caller waits

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Marks a request as in flight for the duration of the block."""
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1
            if not self._count and self._idle is not None:
                self._idle.set()
                self._idle = None

    async def wait_until_idle(self, timeout_s: float) -> None:
        """Return once no request is in flight, and after `timeout_s` at the latest."""
        if not self._count:
            return
        if self._idle is None:
            self._idle = asyncio.Event()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)

    def start_watching(self, job_id: str) -> None:
        self._watched.add(job_id)
        self.on_watch_started(job_id)

    def stop_watching(self, job_id: str) -> None:
        self._watched.discard(job_id)

    def is_watched(self, job_id: str) -> bool:
        return job_id in self._watched
