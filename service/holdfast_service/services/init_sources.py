"""Resolves a job's `init_from` at submission, and protects that checkpoint until the job no longer
needs it.

The result is stored with the job: `{uri, step, what, job, held}`. `held` says that the checkpoint
bears the job's mark, which protects it from retention and from removal by users until the job has
a checkpoint of its own, or has ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import UUID

import structlog
from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_service.errors import InvalidSpec, StorageUnavailable
from holdfast_service.job_model.init_from import (
    FolderReference,
    SavedCheckpoint,
    mismatches,
    parse_reference,
    part_to_load,
)
from holdfast_service.job_model.job_reference import JobReference
from holdfast_service.job_model.job_spec import InitFromSpec, JobSpec
from holdfast_service.remote_tier.location import SecretUnusable
from holdfast_service.remote_tier.storage_calls import StorageCalls
from holdfast_service.services.data_paths import DataPaths
from holdfast_service.services.named_folder import names_within
from holdfast_service.settings import Settings
from holdfast_service.store import queries
from holdfast_service.store.engine import Store
from holdfast_service.store.leases import LeaseLost, RowLease
from holdfast_service.store.models import Checkpoint, JobRecord
from holdfast_service.store.transaction import job_transaction
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
from holdfast_workers.protocol.messages import DCP_URI_PREFIX, InitPart
from holdfast_workers.spec import SpecFault
from holdfast_workers.state.layout import MODEL_PREFIX

_DCP_METADATA = ".metadata"
_log = structlog.get_logger()


class InitSources:
    """Finds the checkpoint named by `init_from`, checks that it fits, and marks it as needed."""

    def __init__(
        self, store: Store, settings: Settings, data_paths: DataPaths | None = None
    ) -> None:
        """`data_paths` is used by :meth:`resolve`."""
        self._store = store
        self._data_paths = data_paths
        self._storage_calls = StorageCalls(settings)
        # Folders of users may hang: jobs that start from other jobs do not wait behind them.
        self._folder_calls = StorageCalls(settings)
        self._check_paths = settings.check_data_paths

    async def resolve(self, spec: JobSpec, job_id: str | None) -> dict[str, Any] | None:
        """The checkpoint that the job starts from, marked as needed by it; None: its seed. Without
        a `job_id` the checkpoint is only checked.

        Raises InvalidSpec at `init_from`, StorageUnavailable.
        """
        if spec.init_from is None:
            return None
        try:
            named = parse_reference(spec.init_from.source)
        except ValueError as error:
            raise _invalid(str(error)) from error
        try:
            if isinstance(named, FolderReference):
                return await self._of_folder(spec, named, job_id)
            source, uri = await self._of_job(named)
            return await self._check_and_hold(spec, uri, job_id, source, self._storage_calls)
        except BadCheckpoint as error:
            raise _invalid(str(error)) from error
        except StorageUnavailable as error:
            # A retry does not help.
            if isinstance(error.__cause__, (StorageDenied, SecretUnusable)):
                raise _invalid(str(error)) from error
            raise

    async def check_again(self, spec: JobSpec, origin: Mapping[str, Any] | None) -> None:
        """Check the checkpoint that :meth:`resolve` found for the job once more, now that
        `data.prepared` is known.

        Raises InvalidSpec at `init_from`, StorageUnavailable.
        """
        if origin is not None:
            start = InitFromSpec.model_validate({"from": origin["uri"], "what": origin["what"]})
            await self.resolve(spec.model_copy(update={"init_from": start}), None)

    async def release(self, job: JobRecord) -> None:
        """Take the job's mark off the checkpoint. Idempotent. Raises StorageUnavailable."""
        if job.origin is not None and is_held_for(job):
            storage = self._storage_calls.storage_at(job.origin["uri"], job.spec)
            await self._storage_calls.run(marks.unmark_needed, storage, job.id)

    async def _of_job(self, named: JobReference) -> tuple[str, str]:
        """Id of the job, URI of its checkpoint."""
        async with self._store.read() as session:
            job = await _find_job(session, named.job)
            if job is None:
                raise _invalid(f"there is no job {named.job!r}: give a job's id or name")
            rows = [
                row
                for row in await queries.checkpoints(session, job.id)
                if row.deleted_at is None and row.bad is None
            ]
        fitting = [row for row in rows if named.step in (None, row.step)]
        if not fitting:
            raise _invalid(_missing_step_message(named, rows))
        return job.id, fitting[0].uri

    async def _of_folder(
        self, spec: JobSpec, named: FolderReference, job_id: str | None
    ) -> dict[str, Any]:
        fault = uri_fault(named.uri)
        if fault is not None:
            raise _invalid(f"{named.uri}: {fault}")
        storage = self._storage_calls.storage_at(named.uri, spec.model_dump(mode="json"))
        dcp = named.dcp
        if not dcp and named.uri.startswith("/"):
            dcp = await self._folder_calls.run(_is_torch_checkpoint, storage)
        if not dcp:
            uri = named.uri.rstrip("/")
            return await self._check_and_hold(spec, uri, job_id, None, self._folder_calls)
        return await self._of_torch_folder(spec, named.uri)

    async def _of_torch_folder(self, spec: JobSpec, folder: str) -> dict[str, Any]:
        """Checks only that `.metadata` exists: it is a pickle, which the service must not read; the
        workers read it because the user has named it."""
        assert spec.init_from is not None
        if not folder.startswith("/"):
            raise _invalid("a torch.distributed checkpoint must be given as an absolute path")
        if spec.init_from.what is InitPart.EVERYTHING:
            raise _invalid(
                "of a torch.distributed checkpoint only the model can be loaded: set `what: model`"
            )
        if self._check_paths:
            await self._require_metadata(folder)
        return _origin(DCP_URI_PREFIX + folder, 0, InitPart.MODEL, None, held=False)

    async def _require_metadata(self, folder: str) -> None:
        """Raises InvalidSpec."""
        metadata = Path(folder) / _DCP_METADATA
        if self._data_paths is not None and self._data_paths.on_nodes:
            why = await self._data_paths.look_on_a_node(str(metadata))
            if why is not None:
                raise _invalid(f"{metadata} {why}: give a folder that every node can read")
            return
        try:
            if not await self._folder_calls.run(metadata.is_file):
                raise _invalid(
                    f"{folder} has no {_DCP_METADATA}: it is not a torch.distributed checkpoint"
                )
        except OSError as error:
            raise _invalid(f"cannot read {metadata}: {error.strerror}") from error

    async def _check_and_hold(
        self,
        spec: JobSpec,
        uri: str,
        job_id: str | None,
        source: str | None,
        calls: StorageCalls,
    ) -> dict[str, Any]:
        """Check the checkpoint by its manifest, and hold it for the job."""
        storage = calls.storage_at(uri, spec.model_dump(mode="json"))
        manifest = await calls.run(_manifest, storage)
        if manifest is None:
            raise _invalid(f"{uri} is not a complete checkpoint: it has no manifest")
        saved = _saved_state(manifest)
        part = part_to_load(spec, saved)
        why = mismatches(spec, saved, part)
        if why:
            raise _invalid(f"cannot start from {part} of {uri}: {'; '.join(why)}")
        try:
            held = job_id is not None and await calls.run(_mark_as_needed, storage, job_id)
        except marks.BeingRemoved as error:
            raise _invalid(str(error)) from error
        step = manifest.step if part is InitPart.EVERYTHING else 0
        return _origin(uri, step, part, source, held=held)


class InitHold:
    """The mark that a driven job has on its initial checkpoint: removed once, in the background."""

    def __init__(self, store: Store, sources: InitSources, lease: RowLease, retry_s: float) -> None:
        self._store = store
        self._sources = sources
        self._lease = lease
        self._retry_s = retry_s
        self._releasing: asyncio.Task[None] | None = None
        self._not_before = 0.0  # monotonic

    def release_in_background(self, job: JobRecord) -> None:
        """The job's driver does not wait for the storage; a failure is retried later."""
        if time.monotonic() >= self._not_before:
            self._not_before = time.monotonic() + self._retry_s
            self._releasing = asyncio.create_task(self._release_quietly(job))

    async def release(self, job: JobRecord) -> bool:
        """Remove the mark and record that. False: the storage failed, try again later."""
        try:
            await self._sources.release(job)
        except StorageUnavailable as error:
            _log.warning("cannot release a job's initial checkpoint", job=job.id, why=str(error))
            return False
        async with job_transaction(self._store, job.id, token=self._lease.token) as tx:
            tx.job.origin = {**(tx.job.origin or {}), "held": False}
        return True

    async def close(self) -> None:
        """Cancel a release that is in progress, and wait until it has stopped."""
        if self._releasing is not None:
            self._releasing.cancel()
            await asyncio.wait([self._releasing])

    async def _release_quietly(self, job: JobRecord) -> None:
        try:
            await self.release(job)
        except (LeaseLost, SQLAlchemyError) as error:
            _log.warning("cannot release a job's initial checkpoint", job=job.id, why=repr(error))


def is_held_for(job: JobRecord) -> bool:
    """Whether the job's initial checkpoint bears its mark."""
    return job.origin is not None and bool(job.origin["held"])


async def has_own_checkpoint(session: AsyncSession, job_id: str) -> bool:
    """Whether a job has a usable checkpoint of its own, so that it needs no initial one."""
    usable = (Checkpoint.deleted_at.is_(None), Checkpoint.bad.is_(None))
    found = select(Checkpoint.uri).where(Checkpoint.job_id == job_id, *usable).limit(1)
    return await session.scalar(found) is not None


async def _find_job(session: AsyncSession, named: str) -> JobRecord | None:
    """The job with that id, or the newest with that name."""
    try:
        if str(UUID(named)) == named:
            return await session.get(JobRecord, named)
    except ValueError:
        pass
    newest = select(JobRecord).where(JobRecord.name == named).order_by(JobRecord.id.desc()).limit(1)
    found: JobRecord | None = await session.scalar(newest)
    return found


def _is_torch_checkpoint(storage: Storage) -> bool:
    """Whether it was saved by torch.distributed alone, which writes no manifest. An unfinished or
    half removed checkpoint of Holdfast has none either: a job cannot start from it. Raises
    StorageDenied for a folder that is too large: every further step looks through it."""
    manifest, names = _manifest(storage), names_within(Path(storage.uri))
    if manifest is not None or FOLDER_NAME.fullmatch(storage.uri.rpartition("/")[2]):
        return False
    return _DCP_METADATA in names and not marks.has_own_marks(names)


def _manifest(storage: Storage) -> Manifest | None:
    try:
        return read_manifest(storage)
    except ObjectMissing:
        return None


def _mark_as_needed(storage: Storage, job_id: str) -> bool:
    """False where the storage is read-only: then Holdfast cannot protect the checkpoint."""
    try:
        marks.mark_needed(storage, job_id)
    except StorageDenied:
        return False
    return True


def _saved_state(manifest: Manifest) -> SavedCheckpoint:
    shapes = {
        name.removeprefix(MODEL_PREFIX): tensor.global_shape
        for name, tensor in model_parameters(manifest).items()
    }
    return SavedCheckpoint(manifest.step, shapes, manifest.extra.get("training"))


def _origin(
    uri: str, step: int, part: InitPart, source: str | None, *, held: bool
) -> dict[str, Any]:
    return {"uri": uri, "step": step, "what": part.value, "job": source, "held": held}


def _missing_step_message(named: JobReference, rows: list[Checkpoint]) -> str:
    if not rows:
        return f"job {named.job} has no remote checkpoint"
    steps = ", ".join(str(step) for step in sorted({row.step for row in rows}))
    return f"job {named.job} has no checkpoint of step {named.step}; it has steps {steps}"


def _invalid(why: str) -> InvalidSpec:
    return InvalidSpec.of([SpecFault(path="init_from", message=why)])
