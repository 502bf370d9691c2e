"""What one may do with a job's checkpoints: list, verify, pin, remove, export.

The database says which there are; their storage says which are marked, and is the truth of it. A
checkpoint is addressed by its step: of several at one step the latest attempt's that is not known
to be bad. Nothing here is done in a transaction that waits for the storage.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, TypeVar

from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_service.job_model.job_errors import JobError, SpecUnreadable
from holdfast_service.job_model.job_spec import JobSpec
from holdfast_service.job_model.lifecycle import State
from holdfast_service.remote_tier.storage_calls import StorageCalls, StorageNotAnswering
from holdfast_service.services.checkpoint_verification import Verification
from holdfast_service.settings import Settings
from holdfast_service.store import json_safe, queries, series
from holdfast_service.store.engine import Store
from holdfast_service.store.job_lookup import find_job, spec_of
from holdfast_service.store.models import Checkpoint, Job
from holdfast_service.store.transaction import job_transaction
from holdfast_service.views.jobs import (
    CheckpointsView,
    CheckpointView,
    MemoryTierView,
    VerificationView,
)
from holdfast_workers.checkpoint import export, manifest, marks
from holdfast_workers.checkpoint.retention import quarantine
from holdfast_workers.checkpoint.retention_rules import Stored, best
from holdfast_workers.checkpoint.storage import ObjectMissing, Storage, StorageError

Answer = TypeVar("Answer")
_PROTECTED = series.COLUMNS.index("protected_step")


class CheckpointNotFound(JobError):
    code = "checkpoint_not_found"


class CheckpointPinned(JobError):
    code = "checkpoint_pinned"


class CheckpointNeeded(JobError):
    """Another job was told to begin with it."""

    code = "checkpoint_needed"


class CheckpointBad(JobError):
    """It is not as it was saved."""

    code = "checkpoint_bad"


class LastCheckpoint(JobError):
    """The job could go on from nothing else in the remote tier."""

    code = "last_checkpoint"


class CheckpointBeingRemoved(JobError):
    code = "being_removed"


class CannotExport(JobError):
    """Not in the form that was asked for."""

    code = "not_exportable"


@dataclass(frozen=True)
class Export:
    """A file without a name, whole and verified; whoever has it closes it."""

    file: IO[bytes]
    nbytes: int
    name: str


@dataclass(frozen=True)
class Found:
    """A checkpoint, whose it is, and where it lies."""

    job: Job
    row: Checkpoint
    at: Storage


class CheckpointService:
    """All calls raise JobNotFound, and CheckpointNotFound for a step without a checkpoint."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store = store
        self._settings = settings
        self._storages = StorageCalls(settings)
        self._removals: dict[tuple[str, int], asyncio.Task[None]] = {}

    async def list(self, job_id: str) -> CheckpointsView:
        """By tier. The storage's trouble is told, and leaves what the database knows."""
        async with self._store.read() as session:
            job = await find_job(session, job_id)
            rows = await queries.checkpoints(session, job_id)
            protected = await _protected_step(session, job)
        there = [row for row in rows if row.deleted_at is None]
        names: dict[str, set[str]] | None = None
        problem = None
        try:
            names = await self._names(job, {_root_of(row) for row in there})
        except StorageNotAnswering as error:
            problem = str(error)
        kept_as_best: set[str] = set()
        with contextlib.suppress(SpecUnreadable):
            kept_as_best = _best(spec_of(job), there)
        return CheckpointsView(
            memory=MemoryTierView(protected_step=protected),
            remote=tuple(
                queries.checkpoint_view(
                    row,
                    None if names is None else _marks(row, names),
                    best=row.uri in kept_as_best,
                )
                for row in rows
            ),
            storage_problem=problem,
        )

    async def find(self, job_id: str, step: int) -> Found:
        async with self._store.read() as session:
            job = await find_job(session, job_id)
            row = await _at_step(session, job_id, step)
        return Found(job, row, self._storages.at(row.uri, job.spec))

    async def verify(self, found: Found) -> AsyncGenerator[VerificationView, None]:
        """Read every byte, and say how far it is, until `done`. What is bad is quarantined."""
        reading = Verification(found.at, found.row).progress(
            self._storages, self._settings.storage_deadline_s
        )
        async with aclosing(reading) as said:
            async for word in said:
                problem = await self._verified(found, word.bad) if word.done else None
                yield word
                if problem is not None:
                    yield word.model_copy(update={"problem": problem})

    async def pin(self, job_id: str, step: int) -> CheckpointView:
        """Let retention and users leave it alone; again is the same."""
        found = await self.find(job_id, step)
        try:
            await self._storages.run(_present, marks.pin, found.at)
        except marks.BeingRemoved as error:
            raise CheckpointBeingRemoved(f"step {step} is being removed") from error
        return await self._told(found.row, "checkpoint.pinned")

    async def unpin(self, job_id: str, step: int) -> CheckpointView:
        found = await self.find(job_id, step)
        await self._storages.run(marks.unpin, found.at)
        return await self._told(found.row, "checkpoint.unpinned")

    async def remove(self, job_id: str, step: int) -> None:
        """Raises CheckpointPinned, CheckpointNeeded, LastCheckpoint; StorageNotAnswering while it
        goes on, too: to ask again is to wait on."""
        removal = self._removals.get((job_id, step))
        if removal is None:
            found = await self.find(job_id, step)
            borne = marks.marks_among(await self._storages.run(found.at.objects))
            if borne.pinned:
                raise CheckpointPinned(f"step {step} is pinned: unpin it first")
            await self._refuse_needed(found, borne.needed_by)
            removal = asyncio.create_task(self._removed(found, await self._whole_others(found)))
            self._removals[job_id, step] = removal
            removal.add_done_callback(lambda _: self._removals.pop((job_id, step)))
        deadline_s = self._settings.storage_deadline_s
        try:
            await asyncio.wait_for(asyncio.shield(removal), deadline_s)
        except TimeoutError as error:
            raise StorageNotAnswering(
                f"step {step} is being removed, and was not gone in {deadline_s:g} s"
            ) from error

    async def _removed(self, found: Found, whole: set[str]) -> None:
        """However long the storage takes, and whoever waits: a claim is given back only when
        nobody removes any more."""
        await self._claim(found, whole)
        why = "removed by a user"
        try:
            removed = await self._storages.start(marks.remove_unmarked, found.at)
        except StorageError as error:
            if not await self._storages.start(_is_gone, found.at):
                await self._give_back(found)
                raise StorageNotAnswering(f"it was not removed: {error}") from error
            removed, why = True, f"{why}; files of it are left: {error}"
        if not removed:
            await self._give_back(found)
            raise CheckpointPinned(f"step {found.row.step} has been marked just now, and was left")
        async with job_transaction(self._store, found.job.id) as tx:
            said = {"step": found.row.step, "uri": found.row.uri, "why": why}
            tx.emit("checkpoint.deleted", said)

    async def export(self, job_id: str, step: int, *, hugging_face: bool = False) -> Export:
        """The model's parameters as safetensors, verified. Raises CannotExport, CheckpointBad."""
        at = (await self.find(job_id, step)).at
        folder = self._settings.data_dir / "exports"
        try:
            read = await self._storages.run(_present, manifest.read_manifest, at)
            plan = export.plan_export(read, hugging_face=hugging_face)
            file = await self._storages.read_through(
                self._settings.export_deadline_s, _exported, at, plan, folder
            )
        except export.NotExportable as error:
            raise CannotExport(f"step {step}: {error}") from error
        except manifest.CheckpointError as error:
            raise CheckpointBad(f"step {step} is not as it was saved: {error}") from error
        except OSError as error:
            why = f"no room for the {plan.nbytes} bytes of the file in {folder}: {error.strerror}"
            raise StorageNotAnswering(why) from error
        return Export(file, plan.nbytes, f"step-{step:08d}.safetensors")

    async def _names(self, job: Job, roots: set[str]) -> dict[str, set[str]]:
        """Names of the objects below each root."""
        found = {}
        for root in sorted(roots):
            at = self._storages.at(root, job.spec)
            found[root] = set(await self._storages.run(at.objects))
        return found

    async def _verified(self, found: Found, bad: str | None) -> str | None:
        """Known before anything else is tried; why a bad one could not be quarantined, if so."""
        async with job_transaction(self._store, found.job.id) as tx:
            row = await tx.session.get_one(Checkpoint, (found.job.id, found.row.uri))
            said = {"step": row.step, "uri": row.uri}
            if bad is None:
                row.verified_at = tx.now
                tx.emit("checkpoint.verified", said)
            else:
                row.bad = json_safe.text(bad)
                tx.emit("checkpoint.bad", {**said, "message": bad})
        try:
            if bad is not None:
                await self._storages.run(quarantine, found.at, bad)
        except StorageNotAnswering as error:
            return f"it is bad, and could not be put in quarantine: {error}"
        return None

    async def _told(self, checkpoint: Checkpoint, kind: str) -> CheckpointView:
        async with job_transaction(self._store, checkpoint.job_id) as tx:
            tx.emit(kind, {"step": checkpoint.step, "uri": checkpoint.uri})
        shown = await self.list(checkpoint.job_id)
        return next(one for one in shown.remote if one.uri == checkpoint.uri)

    async def _refuse_needed(self, found: Found, jobs: tuple[str, ...]) -> None:
        """A job that has ended, or was never stored, needs nothing any more."""
        for needing in jobs:
            async with self._store.read() as session:
                job = await session.get(Job, needing)
            if job is not None and not State(job.state).terminal:
                raise CheckpointNeeded(
                    f"job {job.name} ({job.id}) is to begin with step {found.row.step}, and has "
                    "saved nothing of its own yet"
                )
            await self._storages.run(marks.need_no_more, found.at, needing)

    async def _whole_others(self, found: Found) -> set[str]:
        """The job's other checkpoints that look whole: a manifest, and every file of the size
        that it says."""
        async with self._store.read() as session:
            rows = await queries.checkpoints(session, found.job.id)
        whole = set()
        for row in rows:
            if row.uri != found.row.uri and row.deleted_at is None and row.bad is None:
                at = self._storages.at(row.uri, found.job.spec)
                if await self._storages.run(_looks_whole, at):
                    whole.add(row.uri)
        return whole

    async def _claim(self, found: Found, whole: set[str]) -> None:
        """Take it off the record, under the job's lock: two that remove different ones at once
        must not leave a job that has not ended without any. Raises LastCheckpoint."""
        async with job_transaction(self._store, found.job.id) as tx:
            rows = await queries.checkpoints(tx.session, found.job.id)
            left = [row for row in rows if row.uri in whole and row.deleted_at is None]
            if not (left or tx.state.terminal or found.row.bad is not None):
                raise LastCheckpoint(
                    f"step {found.row.step} is the only good checkpoint of a job that is "
                    f"{tx.job.state}: it may have to go on from it"
                )
            row = next(row for row in rows if row.uri == found.row.uri)
            if row.deleted_at is not None:
                raise CheckpointNotFound(f"step {row.step} has just been removed")
            row.deleted_at, row.deleted_why = tx.now, "removed by a user"

    async def _give_back(self, found: Found) -> None:
        """What was claimed is still there after all."""
        async with job_transaction(self._store, found.job.id) as tx:
            row = await tx.session.get_one(Checkpoint, (found.job.id, found.row.uri))
            row.deleted_at = row.deleted_why = None


async def _at_step(session: AsyncSession, job_id: str, step: int) -> Checkpoint:
    at_step = [
        row
        for row in await queries.checkpoints(session, job_id)
        if row.step == step and row.deleted_at is None
    ]
    if not at_step:
        raise CheckpointNotFound(f"job {job_id} has no checkpoint of step {step}")
    return max(at_step, key=lambda row: (row.bad is None, row.attempt))


async def _protected_step(session: AsyncSession, job: Job) -> int | None:
    """As the newest row says; nothing is in memory any more once the job has ended."""
    if State(job.state).terminal:
        return None
    newest = None
    async with aclosing(series.read_rows(session, job.id, max(0, job.cursor_step - 1))) as rows:
        async for _step, _attempt, values in rows:
            newest = values[_PROTECTED]
    return newest if newest is not None and newest >= 0 else None


def _best(spec: JobSpec, rows: list[Checkpoint]) -> set[str]:
    rule = spec.checkpoint.remote.keep_best
    if rule is None:
        return set()
    by_age = {(row.step, row.attempt): row.uri for row in rows if row.bad is None}
    stored = [
        Stored(row.step, row.attempt, metrics=queries.finite(row.metrics))
        for row in rows
        if row.bad is None
    ]
    return {by_age[one.age] for one in best(stored, rule)}


def _marks(row: Checkpoint, names: dict[str, set[str]]) -> marks.Marks:
    root, _, folder = row.uri.rpartition("/")
    return marks.marks_among(names.get(root, ()), folder)


def _root_of(row: Checkpoint) -> str:
    return row.uri.rpartition("/")[0]


def _looks_whole(at: Storage) -> bool:
    try:
        files = manifest.complete_manifest(at).files
    except manifest.BadCheckpoint:
        return False
    sizes = at.objects()
    return all(sizes.get(file.name) == file.nbytes for file in files)


def _is_gone(at: Storage) -> bool:
    """After a removal that failed. One that is whole still, or whose storage does not say, may be
    marked and removed again."""
    try:
        return not marks.undo_removal(at)
    except StorageError:
        return False


def _present(call: Callable[[Storage], Answer], at: Storage) -> Answer:
    try:
        return call(at)
    except ObjectMissing as error:
        raise CheckpointNotFound(f"{at.uri} is not there any more") from error


def _exported(at: Storage, plan: export.ExportPlan, folder: Path) -> IO[bytes]:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = TemporaryFile(dir=folder)  # noqa: SIM115  (who gets it closes it)
    try:
        export.write_export(at, plan, file)
    except BaseException:
        file.close()
        raise
    return file
