"""Finds what a job's `init_from` names, when it is submitted, and keeps it until it is not needed.

What is found is stored with the job: `{uri, step, what, job, held}`. `held` says that the
checkpoint bears the job's mark, which keeps retention and users off it until the job has a
checkpoint of its own, or has ended.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any
from uuid import UUID

import structlog
from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_service.job_model.init_from import (
    FolderReference,
    JobReference,
    Saved,
    misfits,
    part_to_take,
    reference,
)
from holdfast_service.job_model.job_spec import InvalidSpec, JobSpec
from holdfast_service.remote_tier.storage_calls import StorageCalls, StorageNotAnswering
from holdfast_service.settings import Settings
from holdfast_service.store import queries
from holdfast_service.store.engine import Store
from holdfast_service.store.leases import Lease
from holdfast_service.store.models import Checkpoint, Job
from holdfast_service.store.transaction import LeaseLost, job_transaction
from holdfast_workers.checkpoint import marks
from holdfast_workers.checkpoint.export import model_parameters
from holdfast_workers.checkpoint.manifest import (
    FOLDER_NAME,
    BadCheckpoint,
    Manifest,
    read_manifest,
)
from holdfast_workers.checkpoint.storage import (
    ObjectMissing,
    Storage,
    StorageDenied,
    uri_fault,
)
from holdfast_workers.protocol.messages import STOCK_URI, InitPart
from holdfast_workers.spec import Fault
from holdfast_workers.state.layout import MODEL_PREFIX

_STOCK_METADATA = ".metadata"
_log = structlog.get_logger()


class Origins:
    def __init__(self, store: Store, settings: Settings) -> None:
        self._store = store
        self._storages = StorageCalls(settings)
        self._check_paths = settings.check_data_paths

    async def resolve(self, spec: JobSpec, job_id: str | None) -> dict[str, Any] | None:
        """What the job is to begin with, marked as needed by it; None: its seed. Without a
        `job_id` it is only looked at.

        Raises InvalidSpec at `init_from`, StorageNotAnswering.
        """
        if spec.init_from is None:
            return None
        try:
            named = reference(spec.init_from.source)
        except ValueError as error:
            raise _invalid(str(error)) from error
        try:
            if isinstance(named, FolderReference):
                return await self._of_folder(spec, named, job_id)
            source, uri = await self._of_job(named)
            return await self._taken(spec, uri, job_id, source)
        except BadCheckpoint as error:
            raise _invalid(str(error)) from error
        except StorageNotAnswering as error:
            if isinstance(error.__cause__, StorageDenied):  # to try again does not help
                raise _invalid(str(error)) from error
            raise

    async def let_go(self, job: Job) -> None:
        """The job needs it no more; again is the same. Raises StorageNotAnswering."""
        if job.origin is not None and held_for(job):
            at = self._storages.at(job.origin["uri"], job.spec)
            await self._storages.run(marks.need_no_more, at, job.id)

    async def _of_job(self, named: JobReference) -> tuple[str, str]:
        """Id of the job, URI of its checkpoint."""
        async with self._store.read() as session:
            job = await _job(session, named.job)
            if job is None:
                raise _invalid(f"there is no job {named.job!r}, by id or by name")
            rows = [
                row
                for row in await queries.checkpoints(session, job.id)
                if row.deleted_at is None and row.bad is None
            ]
        fitting = [row for row in rows if named.step in (None, row.step)]
        if not fitting:
            raise _invalid(_no_step(named, rows))
        return job.id, fitting[0].uri

    async def _of_folder(
        self, spec: JobSpec, named: FolderReference, job_id: str | None
    ) -> dict[str, Any]:
        fault = uri_fault(named.uri)
        if fault is not None:
            raise _invalid(f"{named.uri}: {fault}")
        at = self._storages.at(named.uri, spec.model_dump(mode="json"))
        stock = named.stock
        if not stock and named.uri.startswith("/"):
            stock = await self._storages.run(_is_stock_torchs, at)
        if not stock:
            return await self._taken(spec, named.uri.rstrip("/"), job_id, None)
        return await self._of_stock_torch(spec, named.uri)

    async def _of_stock_torch(self, spec: JobSpec, folder: str) -> dict[str, Any]:
        """Looked at from outside alone: its `.metadata` is a pickle, which the workers will read
        because the user has named it."""
        assert spec.init_from is not None
        if not folder.startswith("/"):
            raise _invalid("stock torch's checkpoints are read from an absolute path alone")
        if spec.init_from.what is InitPart.EVERYTHING:
            raise _invalid("of a checkpoint of stock torch the model alone can be taken")
        there = Path(folder) / _STOCK_METADATA
        try:
            if self._check_paths and not await self._storages.run(there.is_file):
                raise _invalid(f"{folder} holds no {_STOCK_METADATA}: it is no stock checkpoint")
        except OSError as error:
            raise _invalid(f"{there}: {error.strerror}") from error
        return _origin(STOCK_URI + folder, 0, InitPart.MODEL, None, held=False)

    async def _taken(
        self, spec: JobSpec, uri: str, job_id: str | None, source: str | None
    ) -> dict[str, Any]:
        """Judged by its manifest, and held for the job."""
        at = self._storages.at(uri, spec.model_dump(mode="json"))
        manifest = await self._storages.run(_manifest, at)
        if manifest is None:
            raise _invalid(f"{uri} holds no complete checkpoint: there is no manifest")
        saved = _saved(manifest)
        part = part_to_take(spec, saved)
        why = misfits(spec, saved, part)
        if why:
            raise _invalid(f"{part} of {uri} cannot be begun with: {'; '.join(why)}")
        try:
            held = job_id is not None and await self._storages.run(_hold, at, job_id)
        except marks.BeingRemoved as error:
            raise _invalid(str(error)) from error
        step = manifest.step if part is InitPart.EVERYTHING else 0
        return _origin(uri, step, part, source, held=held)


class Hold:
    """The mark on what a driven job began with: taken off once, beside the job's turns."""

    def __init__(self, store: Store, origins: Origins, lease: Lease, retry_s: float) -> None:
        self._store = store
        self._origins = origins
        self._lease = lease
        self._retry_s = retry_s
        self._letting_go: asyncio.Task[None] | None = None
        self._not_before = 0.0  # monotonic

    def let_go_meanwhile(self, job: Job) -> None:
        """No turn waits for the storage; what fails is tried again later."""
        if time.monotonic() >= self._not_before:
            self._not_before = time.monotonic() + self._retry_s
            self._letting_go = asyncio.create_task(self._let_go_quietly(job))

    async def let_go(self, job: Job) -> bool:
        """What the job began with need not be kept for it any more; False: to be tried again."""
        try:
            await self._origins.let_go(job)
        except StorageNotAnswering as error:
            _log.warning("what a job began with is still kept for it", job=job.id, why=str(error))
            return False
        async with job_transaction(self._store, job.id, token=self._lease.token) as tx:
            tx.job.origin = {**(tx.job.origin or {}), "held": False}
        return True

    async def close(self) -> None:
        """There will be no further turn; nothing of it goes on afterwards."""
        if self._letting_go is not None:
            self._letting_go.cancel()
            await asyncio.wait([self._letting_go])

    async def _let_go_quietly(self, job: Job) -> None:
        try:
            await self.let_go(job)
        except (LeaseLost, SQLAlchemyError) as error:
            _log.warning("what a job began with is still kept for it", job=job.id, why=repr(error))


def held_for(job: Job) -> bool:
    """Whether what the job began with bears its mark."""
    return job.origin is not None and bool(job.origin["held"])


async def has_own_checkpoint(session: AsyncSession, job_id: str) -> bool:
    """Whether a job could go on without what it began with."""
    usable = (Checkpoint.deleted_at.is_(None), Checkpoint.bad.is_(None))
    found = select(Checkpoint.uri).where(Checkpoint.job_id == job_id, *usable).limit(1)
    return await session.scalar(found) is not None


async def _job(session: AsyncSession, named: str) -> Job | None:
    """By id, or the newest of that name."""
    try:
        if str(UUID(named)) == named:
            return await session.get(Job, named)
    except ValueError:
        pass
    newest = select(Job).where(Job.name == named).order_by(Job.id.desc()).limit(1)
    found: Job | None = await session.scalar(newest)
    return found


def _is_stock_torchs(at: Storage) -> bool:
    """Stock torch writes no manifest. One of ours that was never finished, or is half removed,
    has none either: it is nothing to begin with."""
    if _manifest(at) is not None or FOLDER_NAME.fullmatch(at.uri.rpartition("/")[2]):
        return False
    names = at.objects()
    return _STOCK_METADATA in names and not marks.was_ours(names)


def _manifest(at: Storage) -> Manifest | None:
    try:
        return read_manifest(at)
    except ObjectMissing:
        return None


def _hold(at: Storage, job_id: str) -> bool:
    """False where nothing may be written: then it is not ours to keep."""
    try:
        marks.need(at, job_id)
    except StorageDenied:
        return False
    return True


def _saved(manifest: Manifest) -> Saved:
    shapes = {
        name.removeprefix(MODEL_PREFIX): one.global_shape
        for name, one in model_parameters(manifest).items()
    }
    return Saved(manifest.step, shapes, manifest.extra.get("training"))


def _origin(
    uri: str, step: int, part: InitPart, source: str | None, *, held: bool
) -> dict[str, Any]:
    return {"uri": uri, "step": step, "what": part.value, "job": source, "held": held}


def _no_step(named: JobReference, rows: list[Checkpoint]) -> str:
    if not rows:
        return f"job {named.job} has no remote checkpoint"
    steps = ", ".join(str(step) for step in sorted({row.step for row in rows}))
    return f"job {named.job} has no checkpoint of step {named.step}; there are {steps}"


def _invalid(why: str) -> InvalidSpec:
    return InvalidSpec([Fault(path="init_from", message=why)])
