"""Caches goodput accounts briefly: a job page requests the verdict, the timeline and the incidents
at the same time, and all of them need the same account."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass
from weakref import WeakValueDictionary

from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_service.job_model.goodput import Goodput
from holdfast_service.job_model.lifecycle import State
from holdfast_service.store import accounts
from holdfast_service.store.models import JobRecord

MAX_AGE_S = 2.0
"""An account that includes all events, and a row of the same attempt, is reused for this long."""
_MAX_ENTRIES = 256


@dataclass(frozen=True)
class _CachedGoodput:
    at: float  # monotonic
    event_seq: int
    cursor_attempt: int
    goodput: Goodput


class GoodputCache:
    """The cache, shared by all services of a server. A lock per job prevents duplicate work."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, _CachedGoodput] = OrderedDict()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def get(self, session: AsyncSession, job: JobRecord) -> Goodput:
        """The job's account, at most `MAX_AGE_S` old; the account of an ended job never expires."""
        lock = self._locks.setdefault(job.id, asyncio.Lock())
        async with lock:
            known = self._kept.get(job.id)
            if known is None or not _is_fresh(known, job):
                goodput = await accounts.goodput(session, job, time.time())
                known = self._kept[job.id] = _CachedGoodput(
                    time.monotonic(), job.event_seq, job.cursor_attempt, goodput
                )
                if len(self._kept) > _MAX_ENTRIES:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(job.id)
            return known.goodput


def _is_fresh(known: _CachedGoodput, job: JobRecord) -> bool:
    ended = State(job.state).terminal
    is_same = (known.event_seq, known.cursor_attempt) == (job.event_seq, job.cursor_attempt)
    return is_same and (ended or time.monotonic() - known.at < MAX_AGE_S)
