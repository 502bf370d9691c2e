"""The operations on a job's checkpoints: list, pin, remove, and what verifications store.

The database lists the checkpoints; their storage is the authority on which of them are marked. A
checkpoint is addressed by its step: of several at the same step, the one of the latest attempt
that is not known to be bad. No transaction is open while a call waits for the storage.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from pydantic import TypeAdapter
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_service.errors import (
    CheckpointBeingRemoved,
    CheckpointElsewhere,
    CheckpointNeeded,
    CheckpointNotFound,
    CheckpointPinned,
    JobNotFound,
    LastCheckpoint,
    SpecUnreadable,
    StorageUnavailable,
)
from holdfast_service.job_model.events.checkpoints import (
    CheckpointBadEvent,
    CheckpointDeletedEvent,
    CheckpointPinnedEvent,
    CheckpointUnpinnedEvent,
    CheckpointVerifiedEvent,
)
from holdfast_service.job_model.job_spec import JobSpec
from holdfast_service.job_model.lifecycle import State
from holdfast_service.placement.memory_protection import MemoryProtection
from holdfast_service.remote_tier.location import remote_uri
from holdfast_service.remote_tier.storage_calls import StorageCalls
from holdfast_service.services.job_commands import command_transaction
from holdfast_service.settings import Settings
from holdfast_service.store import queries, series
from holdfast_service.store.engine import Store
from holdfast_service.store.job_lookup import read_job, spec_of
from holdfast_service.store.models import Checkpoint, JobRecord
from holdfast_service.store.transaction import JobTransaction, job_transaction
from holdfast_service.views.checkpoints import CheckpointView, MemoryTierView, memory_place
from holdfast_service.views.pages import CheckpointPage
from holdfast_workers.checkpoint import manifest, marks
from holdfast_workers.checkpoint.retention_rules import StoredCheckpoint, best_checkpoints
from holdfast_workers.checkpoint.storage import ObjectMissing, Storage, StorageError

Answer = TypeVar("Answer")
_MEMORY = TypeAdapter(MemoryProtection)
_PROTECTED = series.COLUMNS.index("protected_step")


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint, the job that owns it, and its storage."""

    job: JobRecord
    row: Checkpoint
    storage: Storage


class CheckpointService:
    """The operations on checkpoints.

    Every call raises JobNotFound, and CheckpointNotFound for a step without a checkpoint.
    """

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store = store
        self._settings = settings
        self.storage_calls = StorageCalls(settings)
        self._removals: dict[tuple[str, int], asyncio.Task[None]] = {}

    async def list(self, job_id: str) -> CheckpointPage:
        """The checkpoints by tier. If the storage fails, the answer has the problem and the
        database's content."""
        async with read_job(self._store, job_id) as (session, job):
            rows = await queries.checkpoints(session, job_id)
            memory = await _memory_tier(session, job)
        present = [row for row in rows if row.deleted_at is None]
        names: dict[str, set[str]] | None = None
        problem = None
        try:
            names = await self._object_names(job, {_root_of(row) for row in present})
        except StorageUnavailable as error:
            problem = str(error)
        kept_as_best: set[str] = set()
        with contextlib.suppress(SpecUnreadable):
            kept_as_best = _uris_kept_as_best(spec_of(job), present)
        return CheckpointPage(
            memory=memory,
            items=tuple(
                queries.checkpoint_view(
                    row,
                    None if names is None else marks.marks_among(_own_names(row, names)),
                    best=row.uri in kept_as_best,
                )
                for row in rows
            ),
            storage_problem=problem,
        )

    async def find(self, job_id: str, step: int) -> FoundCheckpoint:
        async with read_job(self._store, job_id) as (session, job):
            row = await _at_step(session, job_id, step)
        return FoundCheckpoint(job, row, self.storage_calls.storage_at(row.uri, job.spec))

    async def at(self, job_id: str, uri: str) -> FoundCheckpoint:
        """The checkpoint with this URI. Raises CheckpointNotFound also if it was removed."""
        async with read_job(self._store, job_id) as (session, job):
            row = await session.get(Checkpoint, (job_id, uri))
        if row is None or row.deleted_at is not None:
            raise CheckpointNotFound(f"{uri} was removed meanwhile")
        return FoundCheckpoint(job, row, self.storage_calls.storage_at(uri, job.spec))

    @asynccontextmanager
    async def verified(
        self, found: FoundCheckpoint, bad: str | None
    ) -> AsyncIterator[JobTransaction]:
        """A transaction that also stores what reading every byte has shown. `bad`: the fault that
        was found; it is stored once."""
        async with command_transaction(self._store, found.job.id) as tx:
            row = await tx.session.get_one(Checkpoint, (found.job.id, found.row.uri))
            if bad is None:
                row.verified_at = tx.now
                tx.emit(CheckpointVerifiedEvent(step=row.step, uri=row.uri))
            elif row.bad != bad:
                row.bad = bad
                tx.emit(CheckpointBadEvent(step=row.step, uri=row.uri, message=bad))
            yield tx

    async def pin(self, job_id: str, step: int) -> CheckpointView:
        """Protect the checkpoint from retention and from removal by users. Idempotent."""
        found = await self.find(job_id, step)
        try:
            await self.storage_calls.run(_require_present, marks.pin, found.storage)
        except marks.BeingRemoved as error:
            raise CheckpointBeingRemoved(
                f"step {step} is being removed and cannot be pinned any more"
            ) from error
        return await self._emit_and_show(found.row, CheckpointPinnedEvent)

    async def unpin(self, job_id: str, step: int) -> CheckpointView:
        """Take the pin off. Idempotent."""
        found = await self.find(job_id, step)
        await self.storage_calls.run(marks.unpin, found.storage)
        return await self._emit_and_show(found.row, CheckpointUnpinnedEvent)

    async def remove(self, job_id: str, step: int) -> None:
        """Raises CheckpointElsewhere, CheckpointPinned, CheckpointNeeded, LastCheckpoint;
        StorageUnavailable also while the removal is still in progress: a further call waits for the
        same removal."""
        removal = self._removals.get((job_id, step))
        if removal is None:
            found = await self.find(job_id, step)
            self._refuse_foreign(found)
            names = await self.storage_calls.run(found.storage.objects)
            await self._refuse_marked(found, names)
            whole = await self._other_whole_uris(found)
            removal = self._start_removal(found, partial(self._claim_and_remove, whole=whole))
        await self._removed(removal, step)

    async def remove_all(self, job_id: str) -> tuple[str, ...]:
        """Remove all checkpoints of an ended job; also what is left of those whose removal was
        interrupted. Returns their URIs.

        Raises CheckpointElsewhere, CheckpointPinned, CheckpointNeeded before anything is removed;
        StorageUnavailable.
        """
        for (owner, step), removal in list(self._removals.items()):
            if owner == job_id:
                await self._removed(removal, step)
        async with read_job(self._store, job_id) as (session, job):
            rows = await queries.checkpoints(session, job_id)
        names = await self._object_names(job, {_root_of(row) for row in rows})
        present = [
            FoundCheckpoint(job, row, self.storage_calls.storage_at(row.uri, job.spec))
            for row in rows
            if row.deleted_at is None or _own_names(row, names)
        ]
        for found in present:
            self._refuse_foreign(found)
            await self._refuse_marked(found, _own_names(found.row, names))
        for found in present:
            removal = self._start_removal(found, self._complete_removal)
            await self._removed(removal, found.row.step)
        return tuple(found.row.uri for found in present)

    def _start_removal(
        self,
        found: FoundCheckpoint,
        remove: Callable[[FoundCheckpoint], Coroutine[None, None, None]],
    ) -> asyncio.Task[None]:
        """Start the removal, unless the checkpoint is being removed already."""
        key = found.job.id, found.row.step
        if key not in self._removals:
            self._removals[key] = task = asyncio.create_task(remove(found))
            task.add_done_callback(lambda _: self._removals.pop(key))
        return self._removals[key]

    async def _removed(self, removal: asyncio.Task[None], step: int) -> None:
        """Wait until a removal is over. Raises its error, or StorageUnavailable if it takes too
        long."""
        deadline_s = self._settings.storage_deadline_s
        try:
            await asyncio.wait_for(asyncio.shield(removal), deadline_s)
        except TimeoutError as error:
            raise StorageUnavailable(
                f"step {step} is still being removed after {deadline_s:g} s: repeat the call to "
                "wait for it"
            ) from error

    async def _claim_and_remove(self, found: FoundCheckpoint, whole: set[str]) -> None:
        """Runs to its end however long the storage takes, with or without a waiting caller: a
        claim is undone only when no removal is in progress any more."""
        await self._claim(found, whole)
        await self._remove_claimed(found)

    async def _complete_removal(self, found: FoundCheckpoint) -> None:
        """Complete the removal of an ended job's checkpoint, which another call may have
        claimed."""
        with contextlib.suppress(CheckpointNotFound):
            await self._claim(found, set())
        await self._remove_claimed(found)

    async def _remove_claimed(self, found: FoundCheckpoint) -> None:
        why = "removed by a user"
        try:
            removed = await self.storage_calls.start(marks.remove_unmarked, found.storage)
        except StorageError as error:
            if not await self.storage_calls.start(_is_gone, found.storage):
                await self._undo_claim(found)
                raise StorageUnavailable(
                    f"step {found.row.step} was not removed: {error}"
                ) from error
            removed, why = True, f"{why}; some of its files are left: {error}"
        if not removed:
            await self._undo_claim(found)
            raise CheckpointPinned(
                f"step {found.row.step} was pinned or needed by a job just now, and was not removed"
            )
        with contextlib.suppress(JobNotFound):  # another server has removed the job meanwhile
            async with command_transaction(self._store, found.job.id) as tx:
                tx.emit(CheckpointDeletedEvent(step=found.row.step, uri=found.row.uri, why=why))

    async def _object_names(self, job: JobRecord, roots: set[str]) -> dict[str, set[str]]:
        """Root -> names of the objects below it."""
        names = {}
        for root in sorted(roots):
            storage = self.storage_calls.storage_at(root, job.spec)
            names[root] = set(await self.storage_calls.run(storage.objects))
        return names

    async def _emit_and_show(
        self,
        checkpoint: Checkpoint,
        event: type[CheckpointPinnedEvent | CheckpointUnpinnedEvent],
    ) -> CheckpointView:
        async with job_transaction(self._store, checkpoint.job_id) as tx:
            tx.emit(event(step=checkpoint.step, uri=checkpoint.uri))
        shown = await self.list(checkpoint.job_id)
        return next(view for view in shown.items if view.uri == checkpoint.uri)

    def _refuse_foreign(self, found: FoundCheckpoint) -> None:
        """Raises CheckpointElsewhere: a URI comes from a report, and a removal deletes everything
        below it."""
        row = found.row
        uri = spec_of(found.job).checkpoint.remote.uri
        root = remote_uri(uri, self._settings.job_dir(found.job.id))
        if row.uri != f"{root}/{manifest.checkpoint_folder(row.step, row.attempt)}":
            raise CheckpointElsewhere(
                f"{row.uri} is not in the job's own folder {root}: remove it by hand if it is not "
                "needed"
            )

    async def _refuse_marked(self, found: FoundCheckpoint, own_names: Collection[str]) -> None:
        """Raises CheckpointPinned, CheckpointNeeded. `own_names`: of the checkpoint's objects."""
        found_marks = marks.marks_among(own_names)
        if found_marks.pinned:
            raise CheckpointPinned(f"step {found.row.step} is pinned: unpin it first")
        await self._refuse_needed(found, found_marks.needed_by)

    async def _refuse_needed(self, found: FoundCheckpoint, jobs: tuple[str, ...]) -> None:
        """Raises CheckpointNeeded. A job that has ended, or was never stored, needs no checkpoint:
        its mark is taken off."""
        for needing in jobs:
            async with self._store.read() as session:
                job = await session.get(JobRecord, needing)
            if job is not None and not State(job.state).terminal:
                raise CheckpointNeeded(
                    f"job {job.name} ({job.id}) is to start from step {found.row.step}, and has no "
                    "checkpoint of its own yet: wait for it, or cancel that job"
                )
            await self.storage_calls.run(marks.unmark_needed, found.storage, needing)

    async def _other_whole_uris(self, found: FoundCheckpoint) -> set[str]:
        """URIs of the job's other checkpoints that look whole: they have a manifest, and every file
        has the size that it states."""
        async with self._store.read() as session:
            rows = await queries.checkpoints(session, found.job.id)
        whole = set()
        for row in rows:
            if row.uri != found.row.uri and row.deleted_at is None and row.bad is None:
                storage = self.storage_calls.storage_at(row.uri, found.job.spec)
                if await self.storage_calls.run(_looks_whole, storage):
                    whole.add(row.uri)
        return whole

    async def _claim(self, found: FoundCheckpoint, whole: set[str]) -> None:
        """Mark the checkpoint as deleted in the database, under the job's lock: two concurrent
        removals of different checkpoints must not leave a live job without any. Raises
        LastCheckpoint."""
        async with command_transaction(self._store, found.job.id) as tx:
            rows = await queries.checkpoints(tx.session, found.job.id)
            left = [row for row in rows if row.uri in whole and row.deleted_at is None]
            if not (left or tx.state.terminal or found.row.bad is not None):
                raise LastCheckpoint(
                    f"step {found.row.step} is the only good checkpoint of a job that is "
                    f"{tx.job.state}, which may have to continue from it: wait for another "
                    "checkpoint, or cancel the job first"
                )
            row = next(row for row in rows if row.uri == found.row.uri)
            if row.deleted_at is not None:
                raise CheckpointNotFound(f"step {row.step} has just been removed")
            row.deleted_at, row.deleted_why = tx.now, "removed by a user"

    async def _undo_claim(self, found: FoundCheckpoint) -> None:
        """The claimed checkpoint was not removed after all."""
        async with command_transaction(self._store, found.job.id) as tx:
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


async def _memory_tier(session: AsyncSession, job: JobRecord) -> MemoryTierView:
    """The memory tier as of the newest row; it is gone once the job has ended."""
    if State(job.state).terminal:
        return MemoryTierView(protected_step=None, where=memory_place(None, None, ended=True))
    newest = None
    async with aclosing(series.read_rows(session, job.id, job.cursor_step - 1)) as rows:
        async for _step, _attempt, values in rows:
            newest = values[_PROTECTED]
    step = newest if newest is not None and newest >= 0 else None
    attempt = await queries.newest_attempt(session, job.id)
    memory = _MEMORY.validate_python(attempt.memory) if attempt and attempt.memory else None
    return MemoryTierView(protected_step=step, where=memory_place(step, memory, ended=False))


def _uris_kept_as_best(spec: JobSpec, rows: list[Checkpoint]) -> set[str]:
    rule = spec.checkpoint.remote.keep_best
    if rule is None:
        return set()
    by_age = {(row.step, row.attempt): row.uri for row in rows if row.bad is None}
    stored = [
        StoredCheckpoint(row.step, row.attempt, metrics=queries.finite_metrics(row.metrics))
        for row in rows
        if row.bad is None
    ]
    return {by_age[kept.age] for kept in best_checkpoints(stored, rule)}


def _own_names(row: Checkpoint, names: dict[str, set[str]]) -> set[str]:
    """The names of the checkpoint's objects, within its folder."""
    root, _, folder = row.uri.rpartition("/")
    prefix = f"{folder}/"
    below = names.get(root, set())
    return {name.removeprefix(prefix) for name in below if name.startswith(prefix)}


def _root_of(row: Checkpoint) -> str:
    return row.uri.rpartition("/")[0]


def _looks_whole(storage: Storage) -> bool:
    try:
        files = manifest.complete_manifest(storage).files
    except manifest.BadCheckpoint:
        return False
    sizes = storage.objects()
    return all(sizes.get(file.name) == file.nbytes for file in files)


def _is_gone(storage: Storage) -> bool:
    """Whether the checkpoint is gone after a removal that failed. False if it is still whole, or
    its storage does not answer: it may be marked and removed again."""
    try:
        return not marks.undo_removal(storage)
    except StorageError:
        return False


def _require_present(call: Callable[[Storage], Answer], storage: Storage) -> Answer:
    try:
        return call(storage)
    except ObjectMissing as error:
        raise CheckpointNotFound(f"{storage.uri} was removed meanwhile") from error
