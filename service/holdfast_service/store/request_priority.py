"""Whom this process serves right now: what nobody asked for lets requests finish first, and a job
that somebody looks at is looked at often.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator


class Serving:
    """Counts the requests of users that have no answer yet, and knows which jobs are watched. One
    per process, in its loop."""

    def __init__(self) -> None:
        self.on_watched: Callable[[str], None] = lambda job_id: None
        """Called when a job begins to be watched."""
        self._watched: set[str] = set()
        self._count = 0
        self._quiet: asyncio.Event | None = None  # where somebody waits for it

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1
            if not self._count and self._quiet is not None:
                self._quiet.set()
                self._quiet = None

    async def quiet(self, most_s: float) -> None:
        """Returns once nobody is being served, and after `most_s` at the latest."""
        if not self._count:
            return
        if self._quiet is None:
            self._quiet = asyncio.Event()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._quiet.wait(), most_s)

    def begin_to_watch(self, job_id: str) -> None:
        self._watched.add(job_id)
        self.on_watched(job_id)

    def end_to_watch(self, job_id: str) -> None:
        self._watched.discard(job_id)

    def is_watched(self, job_id: str) -> bool:
        return job_id in self._watched
