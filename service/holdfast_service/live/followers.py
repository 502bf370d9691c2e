"""The followers of a job's events or log lines, which wait until there are new ones.

A follower takes the present round, then reads, then waits until the round ends. A change that the
read did not see ends this round or a later one, so no change is missed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Hashable
from enum import Enum
from typing import Any, TypeVar

from holdfast_service.job_model.lifecycle import TERMINAL

T = TypeVar("T")

SAFETY_READ_S = 30.0
"""Followers read at least this often, even if no change was found."""


class JobFeed(Enum):
    """What is followed of a job: the column with the number of its newest item."""

    EVENTS = "event_seq"
    LOGS = "log_lines"

    def head(self, job: Any) -> tuple[int, bool]:
        """Grows whenever the feed has new items or ends. `job`: a row of it."""
        return getattr(job, self.value), job.state in TERMINAL


class Round:
    """The time between two changes of a feed."""

    def __init__(self) -> None:
        self.began = time.monotonic()
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
        self._head = (-1, False)

    def found(self, head: tuple[int, bool]) -> None:
        """End the round if `head` is new; that of an older row is not."""
        if head > self._head:
            self._head = head
            self.end_round()

    def end_round(self) -> None:
        ended, self.round = self.round.ended, Round()
        ended.set_result(None)
