"""Accounts of jobs' time, kept for a moment: whoever watches a job asks for its verdict, its ribbon
and its incidents at once, and all of them rest on the one account."""

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
from holdfast_service.store.models import Job

AGE_S = 2.0
"""An account in which no event is missing is good enough for so long."""
_KEPT = 256


@dataclass(frozen=True)
class _Kept:
    at: float  # monotonic
    event_seq: int
    told: Goodput


class KeptAccounts:
    """Shared by all services of a server."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._making: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def of(self, session: AsyncSession, job: Job) -> Goodput:
        """As it was at most `AGE_S` ago; of an ended job, for ever."""
        making = self._making.setdefault(job.id, asyncio.Lock())
        async with making:
            known = self._kept.get(job.id)
            if known is None or not _is_good(known, job):
                told = await accounts.goodput(session, job, time.time())
                known = self._kept[job.id] = _Kept(time.monotonic(), job.event_seq, told)
                if len(self._kept) > _KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(job.id)
            return known.told


def _is_good(known: _Kept, job: Job) -> bool:
    ended = State(job.state).terminal
    return known.event_seq == job.event_seq and (ended or time.monotonic() - known.at < AGE_S)
