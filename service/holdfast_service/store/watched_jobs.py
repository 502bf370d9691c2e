"""The jobs that a live stream of this process watches: their supervisors are polled more often."""

from __future__ import annotations

from collections.abc import Callable


class WatchedJobs:
    """One instance per process, used in its event loop only."""

    def __init__(self) -> None:
        self.on_watch_started: Callable[[str], None] = lambda job_id: None
        """Called when the first watcher of a job arrives."""
        self._watched: set[str] = set()

    def start_watching(self, job_id: str) -> None:
        self._watched.add(job_id)
        self.on_watch_started(job_id)

    def stop_watching(self, job_id: str) -> None:
        self._watched.discard(job_id)

    def is_watched(self, job_id: str) -> bool:
        return job_id in self._watched
