"""Carries out operations: leases them, reads in threads, stores progress and result.

Every server has a runner. All of it may die at any moment: its leases expire, and the work is
started again from its beginning by another server. Every write needs the lease, so that a slow
server that was replaced, or whose operation was cancelled, changes nothing any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import structlog
from sqlalchemy import delete, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession

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
from holdfast_service.job_model.operations import (
    ACTIVE,
    ExportedWeights,
    OperationKind,
    OperationState,
    ParameterNames,
)
from holdfast_service.operations.export_files import ExportFiles, is_beside
from holdfast_service.services.checkpoints import CheckpointService, FoundCheckpoint
from holdfast_service.settings import Settings
from holdfast_service.store import json_safe, leases
from holdfast_service.store.engine import Store
from holdfast_service.store.lease_holder import LeaseHolder, repeat
from holdfast_service.store.leases import LeaseLost, RowLease
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
"""Operations that run at once: as many as there are threads that read whole checkpoints."""
MAX_STARTS = 5
PROGRESS_S = 0.5
HAND_ON_S = 2.0
THREAD_S = 600.0
"""Longest wait for a thread that reads."""
EXPIRE_EVERY_S = 60.0

Answer = TypeVar("Answer")

log = structlog.get_logger(__name__)


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
        self._leases = LeaseHolder(store, Operation, settings, AT_ONCE, self._perform)

    def wake(self) -> None:
        """Look for operations now."""
        self._leases.wake()

    async def run(self) -> None:
        """Run operations until the task is cancelled; then give back those that it works on."""
        never = asyncio.Event()
        try:
            await asyncio.gather(
                self._leases.keep(never), repeat(self._expire, EXPIRE_EVERY_S, never)
            )
        finally:
            await self._leases.leave(within_s=0.0)

    async def _expire(self) -> None:
        """Remove the operations that are kept no longer, and the files that nobody can fetch."""
        async with self._store.write() as session:
            await session.execute(delete(Operation).where(Operation.expires_at < time.time()))
        # The files first: one that appears after this is of a lease that the database knows.
        present = await asyncio.to_thread(self._files.tokens)
        kept = await self._tokens_of_files()
        await asyncio.to_thread(self._files.remove, present - kept)

    async def _tokens_of_files(self) -> set[str]:
        """The tokens whose files are being written, or may be fetched."""
        exports = select(Operation.lease_token).where(
            Operation.kind == OperationKind.EXPORT,
            Operation.state.in_((*ACTIVE, OperationState.SUCCEEDED)),
        )
        async with self._store.read() as session:
            return {token for token in await session.scalars(exports) if token is not None}

    async def _perform(self, lease: RowLease) -> float:
        begins = asyncio.create_task(self._begin(lease))
        try:
            operation = await asyncio.shield(begins)
        except asyncio.CancelledError:  # it may have begun all the same
            with contextlib.suppress(LeaseLost, SQLAlchemyError, OSError):
                await self._hand_on(await begins)
            raise
        reading = _Reading()
        try:
            await self._crash(CrashPoint.OPERATION_CLAIMED)
            await self._work(operation, reading)
            await self._crash(CrashPoint.OPERATION_ENDED)
        except (LeaseLost, SQLAlchemyError, OSError):
            raise  # it is begun again, unless it was cancelled
        except asyncio.CancelledError:
            await self._hand_on(operation)
            raise
        except ApiError as error:
            await self._fail(operation, error)
        except Exception as error:
            log.error("operation.failed", id=operation.id, exc_info=error)
            why = f"an unexpected error: see the server's log of operation {operation.id}"
            await self._fail(operation, ServerError(why, code="internal_error"))
        finally:
            reading.abandoned = True
        return 0.0

    async def _begin(self, lease: RowLease) -> Operation:
        async with self._store.write() as session:
            operation = await _held(session, lease)
            operation.state = OperationState.RUNNING
            operation.started_at = time.time()
            operation.starts += 1
            operation.done_bytes = 0
            return operation

    async def _hand_on(self, operation: Operation) -> None:
        """Another server, or the next one, may start it at once; this start does not count."""
        with contextlib.suppress(LeaseLost, SQLAlchemyError, OSError, TimeoutError):
            async with asyncio.timeout(HAND_ON_S), self._changed(operation) as stored:
                stored.state = OperationState.PENDING
                stored.starts -= 1
                stored.due_at = 0.0

    async def _work(self, operation: Operation, reading: _Reading) -> None:
        """Raises ApiError, LeaseLost."""
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
        async with self._checkpoints.verified(found, None) as tx:
            stored = await _held(tx.session, _lease(operation))
            self._end(stored, OperationState.SUCCEEDED, reading)

    async def _end_as_bad(
        self, operation: Operation, found: FoundCheckpoint, reading: _Reading, bad: str
    ) -> None:
        """Store the fault, then mark the checkpoint: a cancellation before leaves nothing of both,
        one after cannot take back what was found, so that the mark is made in any case."""
        async with self._checkpoints.verified(found, bad) as tx:
            (await _held(tx.session, _lease(operation))).bad = bad
        try:
            mark = partial(quarantine, found.storage, bad)
            # A copy is abandoned by nobody, even if no thread is free before the operation is lost.
            start = self._checkpoints.storage_calls.start
            await self._in_thread(operation, copy.copy(reading), start, mark)
        except StorageUnavailable as error:
            why = f"step {operation.step} is bad ({bad}), and could not be quarantined: {error}"
            await self._fail(operation, StorageUnavailable(why), reading)
            return
        async with self._changed(operation) as stored:
            self._end(stored, OperationState.SUCCEEDED, reading)

    async def _export(
        self, operation: Operation, found: FoundCheckpoint, reading: _Reading
    ) -> None:
        token = str(operation.lease_token)
        is_folder = operation.names == ParameterNames.HUGGING_FACE

        def open_beside(uri: str) -> Storage:
            if not is_beside(uri, found.job.spec, self._settings.data_dir):
                raise NotExportable(
                    f"the spec that is stored with it names {uri}, which is not in the store of "
                    "its job: export it with its own names"
                )
            return self._checkpoints.storage_calls.storage_at(uri, found.job.spec)

        def write() -> ContentView:
            with _unless_removed(found.storage):
                return self._files.write(
                    found.storage,
                    token,
                    open_beside=open_beside if is_folder else None,
                    averages=operation.weights == ExportedWeights.AVERAGE,
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
        async with self._changed(operation) as stored:
            stored.content = content.model_dump()
            self._end(stored, OperationState.SUCCEEDED, reading)

    async def _fail(
        self, operation: Operation, error: ApiError, reading: _Reading | None = None
    ) -> None:
        async with self._changed(operation) as stored:
            stored.error = {**error.problem, "detail": json_safe.text(error.problem["detail"])}
            self._end(stored, OperationState.FAILED, reading)

    def _end(self, stored: Operation, state: OperationState, reading: _Reading | None) -> None:
        stored.state = state
        stored.ended_at = time.time()
        stored.expires_at = stored.ended_at + self._settings.keep_operations_s
        if reading is not None:
            stored.done_bytes, stored.total_bytes = reading.done_bytes, reading.total_bytes

    @contextlib.asynccontextmanager
    async def _changed(self, operation: Operation) -> AsyncIterator[Operation]:
        """The stored operation, to be changed. Raises LeaseLost."""
        async with self._store.write() as session:
            yield await _held(session, _lease(operation))

    async def _in_thread(
        self,
        operation: Operation,
        reading: _Reading,
        start: Callable[[Callable[[], Answer]], asyncio.Future[Answer]],
        call: Callable[[], Answer],
    ) -> Answer:
        """The result of a call. Raises its error; StorageUnavailable if the storage fails or sends
        nothing for too long; LeaseLost."""

        def begun() -> Answer:
            reading.on_read(0)
            return call()

        silence_s, began = self._settings.storage_deadline_s, reading.signs
        seen, since = began, time.monotonic()
        thread = start(begun)
        thread.add_done_callback(_take_error)
        while not thread.done():
            await asyncio.wait({thread}, timeout=PROGRESS_S)
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
                await self._store_progress(operation, reading)
        try:
            return thread.result()
        except ObjectMissing as error:
            raise CheckpointNotFound(f"{error.uri} was removed meanwhile") from error
        except StorageError as error:
            raise StorageUnavailable(str(error)) from error

    async def _store_progress(self, operation: Operation, reading: _Reading) -> None:
        """Raises LeaseLost. A database that does not answer is asked again."""
        try:
            async with self._changed(operation) as stored:
                stored.done_bytes, stored.total_bytes = reading.done_bytes, reading.total_bytes
        except (SQLAlchemyError, OSError) as error:
            log.warning("operation.progress_not_stored", id=operation.id, error=str(error))


def _lease(operation: Operation) -> RowLease:
    return RowLease(operation.id, operation.lease_token or "")


async def _held(session: AsyncSession, lease: RowLease) -> Operation:
    """The operation, to be changed in this transaction. Raises LeaseLost: it was cancelled, or is
    another server's."""
    operation = await leases.lock(session, Operation, lease.id, lease.token)
    if operation is None or operation.state not in ACTIVE:
        raise LeaseLost(lease.id)
    return operation


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
    """Take the error of a thread that nobody waits for any more; asyncio would report it."""
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
