"""The jobs that users of this process watch: their supervisors are polled more often."""

from __future__ import annotations

import time
from collections.abc import Callable

LOOK_S = 5.0
"""A job counts as looked at for so long after a user has requested it (`GET /jobs/{id}`)."""
_MOST_LOOKS = 1_000


class WatchedJobs:
    """One instance per process, used in its event loop only."""

    def __init__(self) -> None:
        self.on_watch_started: Callable[[str], None] = lambda job_id: None
        """Called when the first watcher of a job arrives."""
        self._watched: set[str] = set()
        self._looks: dict[str, float] = {}
        """Job → when it was last looked at (monotonic), the latest last."""

    def start_watching(self, job_id: str) -> None:
        """A live stream of the job has begun."""
        self._watched.add(job_id)
        self.on_watch_started(job_id)

    def stop_watching(self, job_id: str) -> None:
        self._watched.discard(job_id)

    def is_watched(self, job_id: str) -> bool:
        return job_id in self._watched

    def look(self, job_id: str) -> None:
        """A user has asked for the job, and may do so again soon."""
        self._looks.pop(job_id, None)
        self._looks[job_id] = time.monotonic()
        if len(self._looks) > _MOST_LOOKS:
            del self._looks[next(iter(self._looks))]

    def is_looked_at(self, job_id: str) -> bool:
        looked_at = self._looks.get(job_id)
        return looked_at is not None and time.monotonic() - looked_at < LOOK_S
