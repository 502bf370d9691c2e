"""Wakes the followers of a job's events or log lines when there are new ones.

One poll of the store serves all followers of this process, and runs only while there are any. It
reads the numbers of the newest event and log line of each followed job, and so finds what other
servers write. A transaction of this process wakes the followers as soon as it is stored.

A follower takes the present round, then reads, then waits until the round ends. A change that the
read did not see ends this round or a later one, so no change is missed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Hashable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from enum import Enum
from typing import Any, TypeVar

import structlog
from sqlalchemy import bindparam, select
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_service.job_model.lifecycle import State
from holdfast_service.store.models import JobRecord
from holdfast_service.store.statement import Statement

T = TypeVar("T")

POLL_S = 0.25
"""Between two reads of the store for all followers of jobs, and for all live streams."""
MAX_JOBS_PER_READ = 1000
SAFETY_READ_S = 30.0
"""Followers read at least this often, even if no change was found."""

_JOBS = Statement(
    select(JobRecord.id, JobRecord.state, JobRecord.event_seq, JobRecord.log_lines).where(
        JobRecord.id.in_(bindparam("jobs", expanding=True))
    )
)

log = structlog.get_logger(__name__)


class JobFeed(Enum):
    """What is followed of a job."""

    EVENTS = "events"
    LOGS = "logs"

    def head(self, job: Any | None) -> Hashable:
        """Changes whenever the feed has new items or ends. `job`: its row; None: it was removed."""
        if job is None:
            return None
        if self is JobFeed.EVENTS:
            return int(job.event_seq)
        return job.log_lines, State(job.state).terminal


class Round:
    """The time between two changes of a feed."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._reads: dict[Hashable, asyncio.Task[Any]] = {}

    async def read(self, key: Hashable, read: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of `read`. Calls with the same key share a read that is in progress: what it
        does not see ends this round."""
        task: asyncio.Task[T] | None = self._reads.get(key)
        if task is None:
            task = self._reads[key] = asyncio.create_task(read())
            task.add_done_callback(lambda done: self._read_done(key, done))
        return await asyncio.shield(task)  # another caller may still need it

    def _read_done(self, key: Hashable, done: asyncio.Task[Any]) -> None:
        del self._reads[key]
        if not done.cancelled():
            done.exception()  # marks it as handled: all callers may be gone


class FollowedFeed:
    """A feed of a job that has followers."""

    def __init__(self) -> None:
        self.round = Round()
        self.followers = 0
        self.stored = 0
        """Number of changes that this process has stored."""
        self._head: Hashable = ()  # of no feed: the first poll ends the first round
        self._began = time.monotonic()

    def found(self, head: Hashable) -> None:
        """End the round if `head` is new, or if it is time for a safety read."""
        now = time.monotonic()
        if head == self._head and now - self._began < SAFETY_READ_S:
            return
        ended, self.round = self.round.ended, Round()
        self._head, self._began = head, now
        ended.set_result(None)


class FeedChanges:
    """One instance per process, used in its event loop only."""

    def __init__(
        self, read: Callable[[], AbstractAsyncContextManager[AsyncSession]], poll_s: float = POLL_S
    ) -> None:
        self._read = read
        self._poll_s = poll_s
        self._followed: dict[tuple[str, JobFeed], FollowedFeed] = {}
        self._poll_task: asyncio.Task[None] | None = None

    @contextmanager
    def following(self, job_id: str, feed: JobFeed) -> Iterator[FollowedFeed]:
        """The rounds of a feed, while the block runs."""
        followed = self._followed.setdefault((job_id, feed), FollowedFeed())
        followed.followers += 1
        if self._poll_task is None:
            self._poll_task = asyncio.create_task(self._poll_forever(), name="job-changes")
        try:
            yield followed
        finally:
            followed.followers -= 1
            if not followed.followers:
                del self._followed[job_id, feed]
            if not self._followed and self._poll_task is not None:
                self._poll_task.cancel()
                self._poll_task = None

    def stored(self, job: JobRecord) -> None:
        """Report a change that this process has stored."""
        for feed in JobFeed:
            followed = self._followed.get((job.id, feed))
            if followed is not None:
                followed.stored += 1
                followed.found(feed.head(job))

    async def _poll_forever(self) -> None:
        works = True
        while True:
            began = time.monotonic()
            try:
                await self._poll_once()
                works = True
            except Exception as error:  # all followers depend on this task
                if works:
                    log.warning("job_changes.poll_failed", exc_info=error)
                works = False
            await asyncio.sleep(max(self._poll_s - (time.monotonic() - began), self._poll_s / 4))

    async def _poll_once(self) -> None:
        polled = {key: followed.stored for key, followed in self._followed.items()}
        ids = sorted({job_id for job_id, _ in polled})
        jobs: dict[str, Any] = {}
        for start in range(0, len(ids), MAX_JOBS_PER_READ):
            async with self._read() as session:
                part = ids[start : start + MAX_JOBS_PER_READ]
                jobs |= {job.id: job for job in await _JOBS.all(session, jobs=part)}
        for (job_id, feed), stored in polled.items():
            followed = self._followed.get((job_id, feed))
            # A change that was stored meanwhile may be newer than what was read.
            if followed is not None and followed.stored == stored:
                followed.found(feed.head(jobs.get(job_id)))
