"""The leases that this process holds on the rows of one table, and the task that works on each.

The holder claims rows up to its limit, and renews its time for as long as its event loop runs,
however long a task takes. A task whose lease is lost is cancelled. A lease without a task is given
back: the answer to its claim was lost, or its task ended with an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any
from uuid import uuid4

import structlog
from sqlalchemy.exc import SQLAlchemyError

from holdfast_service.settings import Settings
from holdfast_service.store import leases
from holdfast_service.store.engine import Store
from holdfast_service.store.leases import LeaseLost, RowLease
from holdfast_service.store.models import Leased

log = structlog.get_logger(__name__)

_LEAVE_TIMEOUT_S = 2.0


class LeaseHolder:
    def __init__(
        self,
        store: Store,
        table: type[Leased],
        settings: Settings,
        limit: int,
        work: Callable[[RowLease], Coroutine[Any, Any, float]],
    ) -> None:
        """`work` returns the seconds until an unfinished row is due again. It may raise."""
        self._store = store
        self._table = table
        self._settings = settings
        self._limit = limit
        self._work = work
        self.owner = str(uuid4())
        self.tasks: dict[str, asyncio.Task[None]] = {}
        """The tasks of the rows that the holder works on, by row."""
        self.claimed_at: float | None = None
        """When it last claimed with success, also if there was nothing to claim (monotonic)."""
        self._woken = asyncio.Event()
        self._idle: set[RowLease] = set()  # result of the last check

    def wake(self) -> None:
        """Claim now."""
        self._woken.set()

    async def keep(self, stop: asyncio.Event) -> None:
        """Claim and renew until `stop` is set, and the holder woken, or until it is cancelled."""
        await asyncio.gather(
            repeat(self._claim, self._settings.pace.claim_interval_s, stop, self._woken),
            repeat(self._renew, self._settings.lease_s / 3, stop),
        )

    async def leave(self, within_s: float) -> None:
        """Wait for the tasks, cancel those that take longer, and let others claim all rows."""
        tasks = list(self.tasks.values())
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=within_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        with contextlib.suppress(SQLAlchemyError, OSError, TimeoutError):  # the leases expire then
            async with asyncio.timeout(_LEAVE_TIMEOUT_S):
                await leases.leave(self._store, self.owner)

    async def _claim(self) -> None:
        room = self._limit - len(self.tasks)
        taken = await leases.claim(self._store, self._table, self.owner, room)
        for lease in taken:
            name = f"{self._table.__name__} {lease.id}"
            self.tasks[lease.id] = asyncio.create_task(self._hold(lease), name=name)
        if len(taken) == leases.MAX_CLAIMED:
            self.wake()  # there may be more
        self.claimed_at = time.monotonic()

    async def _hold(self, lease: RowLease) -> None:
        try:
            due_in_s = await self._work(lease)
            if await leases.release(self._store, self._table, lease, due_in_s):
                due_in_s = 0.0
            if due_in_s < self._settings.pace.claim_interval_s:  # else another server may be faster
                asyncio.get_running_loop().call_later(due_in_s, self.wake)
        except LeaseLost:  # or the user has cancelled the work
            log.info("lease.lost", row=lease.id)
            self.wake()  # there is room for another row
        except Exception as error:
            log.error("lease.kept", row=lease.id, exc_info=error)  # until it is found idle
            self.wake()
        finally:
            if self.tasks.get(lease.id) is asyncio.current_task():
                del self.tasks[lease.id]

    async def _renew(self) -> None:
        tasks, lease_s = dict(self.tasks), self._settings.lease_s
        kept = await leases.renew(self._store, self._table, self.owner, tasks, lease_s)
        for row_id in tasks.keys() - kept:
            # The task may have released its lease meanwhile, and a new one may have started.
            if self.tasks.get(row_id) is tasks[row_id]:
                log.warning("lease.lost", row=row_id)
                tasks[row_id].cancel()
                del self.tasks[row_id]
        self.wake()  # a new or an expired owner claims nothing before this
        idle = await leases.idle(self._store, self._table, self.owner, self.tasks)
        # A lease that was claimed a moment ago has no task yet.
        for lease in idle & self._idle:
            log.warning("lease.idle", row=lease.id)
            await leases.release(self._store, self._table, lease, 0.0)
            self.wake()
        self._idle = idle


async def repeat(
    action: Callable[[], Awaitable[None]],
    seconds: float,
    stop: asyncio.Event,
    wake: asyncio.Event | None = None,
) -> None:
    """Call `action` periodically, and at once when `wake` is set; an exception ends only that call.
    Ends at the first wake-up after `stop` is set."""
    while True:
        if wake is not None:
            wake.clear()
        try:
            await action()
        except Exception as error:
            log.error("periodic_action.failed", action=action.__name__, exc_info=error)
        await wait_until_set(wake or stop, seconds)
        if stop.is_set():
            return


async def wait_until_set(wake: asyncio.Event, seconds: float) -> bool:
    """Wait until the event is set or the time is over; True if it is set."""
    if seconds <= 0:
        await asyncio.sleep(0)
    else:
        # Not `wait_for`, which can swallow a cancellation that comes with the wake-up.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await wake.wait()
    return wake.is_set()
