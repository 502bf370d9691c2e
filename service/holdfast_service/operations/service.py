"""What users do with operations: request, look, list, cancel, fetch the file."""

from __future__ import annotations

import time
from collections.abc import Callable

import uuid_utils
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_service.errors import InvalidCursor, NoContent, OperationEnded, OperationNotFound
from holdfast_service.job_model.operations import (
    ACTIVE,
    ExportForm,
    OperationKind,
    OperationState,
)
from holdfast_service.operations.export_files import Content, ExportFiles
from holdfast_service.services.checkpoints import CheckpointService, FoundCheckpoint
from holdfast_service.settings import Settings
from holdfast_service.store.engine import Store
from holdfast_service.store.job_lookup import canonical, not_found
from holdfast_service.store.models import JobRecord, Operation
from holdfast_service.views.operations import ContentView, OperationPage, OperationView


class OperationService:
    """The operations on operations. `wake()` makes the runner of this process look at once."""

    def __init__(
        self,
        store: Store,
        checkpoints: CheckpointService,
        files: ExportFiles,
        settings: Settings,
        wake: Callable[[], None],
    ) -> None:
        self._store = store
        self._checkpoints = checkpoints
        self._files = files
        self._keep_s = settings.keep_operations_s
        self._wake = wake

    async def verify(self, job_id: str, step: int) -> OperationView:
        """Read every byte of a checkpoint. Raises JobNotFound, CheckpointNotFound."""
        return await self._request(job_id, step, OperationKind.VERIFY, None)

    async def export(self, job_id: str, step: int, form: ExportForm) -> OperationView:
        """Write the model of a checkpoint to a file. Raises JobNotFound, CheckpointNotFound."""
        return await self._request(job_id, step, OperationKind.EXPORT, form)

    async def get(self, operation_id: str) -> OperationView:
        """Raises OperationNotFound."""
        async with self._store.read() as session:
            return _view(await _find(session, operation_id))

    async def list(
        self,
        *,
        job_id: str | None = None,
        active: bool | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> OperationPage:
        """Newest first; `active`: only those that have not ended, or only those that have. Raises
        JobNotFound for a malformed id, InvalidCursor."""
        wanted = select(Operation).order_by(Operation.id.desc()).limit(limit + 1)
        if job_id is not None:
            wanted = wanted.where(Operation.job_id == canonical(job_id))
        if active is not None:
            is_active = Operation.state.in_(ACTIVE)
            wanted = wanted.where(is_active if active else ~is_active)
        if cursor is not None:
            wanted = wanted.where(Operation.id < _checked(cursor, InvalidCursor))
        async with self._store.read() as session:
            found = list(await session.scalars(wanted))
        return OperationPage(
            items=tuple(_view(operation) for operation in found[:limit]),
            next_cursor=found[limit - 1].id if len(found) > limit else None,
        )

    async def cancel(self, operation_id: str) -> OperationView:
        """Idempotent. Raises OperationNotFound, OperationEnded."""
        async with self._store.write() as session:
            operation = await _find(session, operation_id, lock=True)
            if operation.state in ACTIVE:  # its server learns of it with its next write
                operation.state = OperationState.CANCELLED
                operation.ended_at = time.time()
                operation.expires_at = operation.ended_at + self._keep_s
            if operation.state != OperationState.CANCELLED:
                raise OperationEnded(f"operation {operation.id} has {operation.state.lower()}")
            return _view(operation)

    async def content(self, operation_id: str) -> Content:
        """The file of an export, which is kept for the full time again. Raises OperationNotFound,
        NoContent, ContentGone."""
        async with self._store.write() as session:
            operation = await _find(session, operation_id, lock=True)
            if operation.content is None or operation.lease_token is None:
                raise NoContent(
                    f"operation {operation.id} ({operation.kind}) is {operation.state}: only an "
                    "export that succeeded has a file"
                )
            content = self._files.open(operation.lease_token, ContentView(**operation.content))
            operation.expires_at = time.time() + self._keep_s
        return content

    async def _request(
        self, job_id: str, step: int, kind: OperationKind, form: ExportForm | None
    ) -> OperationView:
        """One operation for all who request the same at the same time; an export whose file is
        there is not made again."""
        found = await self._checkpoints.find(job_id, step)
        async with self._store.write() as session:
            lock = select(JobRecord.id).where(JobRecord.id == found.job.id).with_for_update()
            if await session.scalar(lock) is None:
                raise not_found(job_id)
            operation = await self._equal(session, found, kind, form)
            if operation is None:
                operation = Operation(
                    id=str(uuid_utils.uuid7()),
                    job_id=found.job.id,
                    kind=kind,
                    uri=found.row.uri,
                    step=step,
                    names=form and form.names,
                    weights=form and form.weights,
                    state=OperationState.PENDING,
                    created_at=time.time(),
                )
                session.add(operation)
                await session.flush()
            view = _view(operation)
        self._wake()
        return view

    async def _equal(
        self,
        session: AsyncSession,
        found: FoundCheckpoint,
        kind: OperationKind,
        form: ExportForm | None,
    ) -> Operation | None:
        same = select(Operation).where(
            Operation.job_id == found.job.id,
            Operation.uri == found.row.uri,
            Operation.kind == kind,
            Operation.names.is_not_distinct_from(form and form.names),
            Operation.weights.is_not_distinct_from(form and form.weights),
        )
        for operation in await session.scalars(
            same.order_by(Operation.id.desc()).with_for_update()
        ):
            if operation.state in ACTIVE:
                return operation
            if operation.content is not None and self._files.exists(str(operation.lease_token)):
                operation.expires_at = time.time() + self._keep_s
                return operation
        return None


def _checked(
    operation_id: str, error: type[InvalidCursor | OperationNotFound] = OperationNotFound
) -> str:
    """Arbitrary text never reaches the database."""
    if len(operation_id) == 36 and operation_id.replace("-", "").isalnum():
        return operation_id
    raise error(f"{operation_id[:64]!r} is the id of no operation")


async def _find(session: AsyncSession, operation_id: str, *, lock: bool = False) -> Operation:
    operation = await session.get(Operation, _checked(operation_id), with_for_update=lock)
    if operation is None:
        raise OperationNotFound(
            f"there is no operation {operation_id}: it was removed with its job, or some time "
            "after its end"
        )
    return operation


def _view(operation: Operation) -> OperationView:
    content = operation.content
    return OperationView.from_attributes(
        operation, content=None if content is None else ContentView(**content)
    )
