"""Carries out operations: claims them, reads in threads, stores progress and result.

Every server has a runner. All of it may die at any moment: a claim expires, and the work is started
again from its beginning by another server.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import structlog
from sqlalchemy.exc import SQLAlchemyError

from holdfast_service import crash_points
from holdfast_service.crash_points import CrashHook, CrashPoint
from holdfast_service.errors import (
    ApiError,
    CannotExport,
    CheckpointBad,
    CheckpointNotFound,
    OperationAbandoned,
    ServerError,
    StorageUnavailable,
)
from holdfast_service.job_model.operations import OperationKind, OperationState, ParameterNames
from holdfast_service.operations.export_files import ExportFiles
from holdfast_service.services.checkpoints import CheckpointService, FoundCheckpoint
from holdfast_service.settings import Settings
from holdfast_service.store import json_safe, operation_claims
from holdfast_service.store.engine import Store
from holdfast_service.store.models import Operation
from holdfast_service.views.operations import ContentView
from holdfast_workers.checkpoint.export import NotExportable
from holdfast_workers.checkpoint.manifest import (
    MANIFEST,
    BadCheckpoint,
    CheckpointError,
    verify,
)
from holdfast_workers.checkpoint.retention import quarantine
from holdfast_workers.checkpoint.storage import ObjectMissing, Storage, StorageError

AT_ONCE = 4
"""As many as there are threads that read whole checkpoints."""
MAX_STARTS = 5
RENEW_S = 0.5
GIVE_BACK_S = 2.0
THREAD_S = 600.0
"""Longest wait for a thread that reads."""
EXPIRE_EVERY_S = 60.0

Answer = TypeVar("Answer")

log = structlog.get_logger(__name__)


class _Lost(Exception):
    """The operation was cancelled, or is another server's."""


class _Abandoned(Exception):
    pass


class _Reading:
    """The progress of a thread that reads a checkpoint, and the means to end it."""

    def __init__(self) -> None:
        self.done_bytes = 0
        self.total_bytes: int | None = None
        self.signs = 0
        """Signs of life: pieces that were read or prepared; the first is the thread's start."""
        self.abandoned = False

    def on_total(self, nbytes: int) -> None:
        self.total_bytes = nbytes

    def on_read(self, nbytes: int) -> None:
        if self.abandoned:
            raise _Abandoned
        self.done_bytes += nbytes
        self.signs += 1


class OperationRunner:
    def __init__(
        self,
        store: Store,
        checkpoints: CheckpointService,
        files: ExportFiles,
        settings: Settings,
        crash_hook: CrashHook | None = None,
    ) -> None:
        self._store = store
        self._checkpoints = checkpoints
        self._files = files
        self._settings = settings
        self._crash = crash_hook or crash_points.hook_from_setting(settings.crash_at)
        self._woken = asyncio.Event()
        self._running: set[asyncio.Task[None]] = set()

    def wake(self) -> None:
        """Look for operations now."""
        self._woken.set()

    async def run(self) -> None:
        """Until it is cancelled; then what it works on is given back."""
        expired_at = 0.0
        try:
            while True:
                self._woken.clear()
                try:
                    await self._start_claimed()
                    if time.monotonic() - expired_at > EXPIRE_EVERY_S:
                        expired_at = time.monotonic()
                        await self._expire()
                except (SQLAlchemyError, OSError) as error:
                    log.warning("operations were not looked for", error=str(error))
                # Not `wait_for`, which can swallow a cancellation that comes with the wake-up.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._settings.pace.claim_interval_s):
                        await self._woken.wait()
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)

    async def _start_claimed(self) -> None:
        for operation in await operation_claims.claim(self._store, AT_ONCE - len(self._running)):
            task = asyncio.create_task(self._perform(operation), name=f"operation {operation.id}")
            self._running.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self.wake()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("an operation's end was not stored", exc_info=error)  # its claim expires

    async def _expire(self) -> None:
        await operation_claims.expire(self._store, time.time())
        # The files first: one that appears after this is of a claim that the database knows.
        present = await asyncio.to_thread(self._files.tokens)
        kept = await operation_claims.tokens_of_exports(self._store)
        await asyncio.to_thread(self._files.remove, present - kept)

    async def _perform(self, operation: Operation) -> None:
        reading = _Reading()
        try:
            await self._crash(CrashPoint.OPERATION_CLAIMED)
            await self._work(operation, reading)
            await self._crash(CrashPoint.OPERATION_ENDED)
        except _Lost:
            log.info("operation.lost", id=operation.id)
        except asyncio.CancelledError:
            # Otherwise the claim expires.
            with contextlib.suppress(SQLAlchemyError, OSError, TimeoutError):
                async with asyncio.timeout(GIVE_BACK_S):
                    await operation_claims.give_back(self._store, operation)
            raise
        except ApiError as error:
            await self._fail(operation, error)
        except (SQLAlchemyError, OSError) as error:  # the claim expires, and it is tried again
            log.error("operation.interrupted", id=operation.id, exc_info=error)
        except Exception as error:
            log.error("operation.failed", id=operation.id, exc_info=error)
            why = f"an unexpected error: see the server's log of operation {operation.id}"
            await self._fail(operation, ServerError(why, code="internal_error"))
        finally:
            reading.abandoned = True

    async def _work(self, operation: Operation, reading: _Reading) -> None:
        """Raises ApiError, _Lost."""
        if operation.starts > MAX_STARTS:
            raise OperationAbandoned(
                f"{MAX_STARTS} servers began with it, and each ended before it was done: look into "
                "their logs (is memory or disk space short?), then request it again"
            )
        found = await self._checkpoints.at(operation.job_id, operation.uri)
        match OperationKind(operation.kind):
            case OperationKind.VERIFY:
                await self._verify(operation, found, reading)
            case OperationKind.EXPORT:
                await self._export(operation, found, reading)

    async def _verify(
        self, operation: Operation, found: FoundCheckpoint, reading: _Reading
    ) -> None:
        reading.on_total(found.row.nbytes)
        calls = self._checkpoints.storage_calls
        judge = partial(_fault, found.storage, reading)
        bad = await self._in_thread(operation, reading, calls.start_reading, judge)
        await self._crash(CrashPoint.OPERATION_WORKED)
        if bad is not None:
            await self._end_as_bad(operation, found, reading, json_safe.text(bad))
            return
        values = self._end(OperationState.SUCCEEDED, reading)
        async with self._checkpoints.verified(found, None) as tx:
            if not await operation_claims.finish(tx.session, operation, **values):
                raise _Lost

    async def _end_as_bad(
        self, operation: Operation, found: FoundCheckpoint, reading: _Reading, bad: str
    ) -> None:
        """Store the fault, then mark the checkpoint: a cancellation before leaves nothing of both,
        one after cannot take back what was found, so that the mark is made in any case."""
        async with self._checkpoints.verified(found, bad) as tx:
            if not await operation_claims.record(tx.session, operation, bad=bad):
                raise _Lost
        values = self._end(OperationState.SUCCEEDED, reading)
        try:
            mark = partial(quarantine, found.storage, bad)
            # A copy is abandoned by nobody, even if no thread is free before the operation is lost.
            start = self._checkpoints.storage_calls.start
            await self._in_thread(operation, copy.copy(reading), start, mark)
        except StorageUnavailable as error:
            why = f"step {operation.step} is bad ({bad}), and could not be quarantined: {error}"
            values = self._failed(StorageUnavailable(why), reading)
        async with self._store.write() as session:
            if not await operation_claims.finish(session, operation, **values):
                raise _Lost

    async def _export(
        self, operation: Operation, found: FoundCheckpoint, reading: _Reading
    ) -> None:
        token = str(operation.token)

        def write() -> ContentView:
            with _unless_removed(found.storage):
                return self._files.write(
                    found.storage,
                    token,
                    hugging_face=operation.names == ParameterNames.HUGGING_FACE,
                    on_total=reading.on_total,
                    on_read=reading.on_read,
                )

        start = self._checkpoints.storage_calls.start_reading
        try:
            content = await self._in_thread(operation, reading, start, write)
        except NotExportable as error:
            raise CannotExport(f"step {operation.step}: {error}") from error
        except CheckpointError as error:
            raise CheckpointBad(
                f"step {operation.step} differs from what was saved: {error}"
            ) from error
        await self._crash(CrashPoint.OPERATION_WORKED)
        values = self._end(OperationState.SUCCEEDED, reading, content=content.model_dump())
        async with self._store.write() as session:
            if not await operation_claims.finish(session, operation, **values):
                raise _Lost

    async def _fail(self, operation: Operation, error: ApiError) -> None:
        async with self._store.write() as session:
            await operation_claims.finish(session, operation, **self._failed(error))

    def _failed(self, error: ApiError, reading: _Reading | None = None) -> dict[str, Any]:
        problem = {**error.problem, "detail": json_safe.text(error.problem["detail"])}
        return self._end(OperationState.FAILED, reading, error=problem)

    def _end(
        self, state: OperationState, reading: _Reading | None, **values: Any
    ) -> dict[str, Any]:
        if reading is not None:
            values |= {"done_bytes": reading.done_bytes, "total_bytes": reading.total_bytes}
        keep_s = self._settings.keep_operations_s
        return {"state": state, "expires_at": time.time() + keep_s} | values

    async def _in_thread(
        self,
        operation: Operation,
        reading: _Reading,
        start: Callable[[Callable[[], Answer]], asyncio.Future[Answer]],
        call: Callable[[], Answer],
    ) -> Answer:
        """The result of a call. Raises its error; StorageUnavailable if the storage fails or sends
        nothing for too long; _Lost."""

        def begun() -> Answer:
            reading.on_read(0)
            return call()

        silence_s, began = self._settings.storage_deadline_s, reading.signs
        seen, since = began, time.monotonic()
        thread = start(begun)
        thread.add_done_callback(_take_error)
        while not thread.done():
            await asyncio.wait({thread}, timeout=RENEW_S)
            quiet_s = time.monotonic() - since
            if reading.signs != seen:
                seen, since = reading.signs, time.monotonic()
            elif seen == began and quiet_s > THREAD_S:
                raise StorageUnavailable(
                    f"no thread became free in {THREAD_S:g} s: all wait for storages that hang"
                )
            elif seen != began and quiet_s > silence_s:
                raise StorageUnavailable(f"the storage sent no byte in {silence_s:g} s")
            if not thread.done():
                await self._renew(operation, reading)
        try:
            return thread.result()
        except ObjectMissing as error:
            raise CheckpointNotFound(f"{error.uri} was removed meanwhile") from error
        except StorageError as error:
            raise StorageUnavailable(str(error)) from error

    async def _renew(self, operation: Operation, reading: _Reading) -> None:
        """Raises _Lost. A database that does not answer is asked again: the claim is long."""
        try:
            kept = await operation_claims.renew(
                self._store, operation, reading.done_bytes, reading.total_bytes
            )
        except (SQLAlchemyError, OSError) as error:
            log.warning("operation.not_renewed", id=operation.id, error=str(error))
            return
        if not kept:
            raise _Lost


@contextlib.contextmanager
def _unless_removed(storage: Storage) -> Iterator[None]:
    """A checkpoint that was removed is not bad. Raises CheckpointNotFound."""
    try:
        yield
    except BadCheckpoint as error:
        if MANIFEST in storage.objects():
            raise
        raise CheckpointNotFound(f"{storage.uri} was removed meanwhile") from error


def _take_error(thread: asyncio.Future[Any]) -> None:
    """Of a thread that nobody waits for any more: asyncio would report it."""
    if not thread.cancelled():
        thread.exception()


def _fault(storage: Storage, reading: _Reading) -> str | None:
    """What is wrong with the checkpoint, or None."""
    try:
        with _unless_removed(storage):
            verify(storage, reading.on_read)
    except BadCheckpoint as error:
        return str(error)
    return None
