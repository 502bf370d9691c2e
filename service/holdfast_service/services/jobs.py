"""The operations on jobs, which the REST layer translates requests into.

All state is read from and written to the store; the cluster is asked only for its capacity. What
has happened to a job is read through `JobService.history` and `JobService.log_reader`.
A submitted job is durable when :meth:`JobService.submit` returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import structlog
import uuid_utils
from sqlalchemy import select, update
from sqlalchemy.exc import IntegrityError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_service import crash_points
from holdfast_service.daemon_threads import DaemonThreads
from holdfast_service.errors import (
    IdempotencyConflict,
    InvalidKey,
    InvalidParameters,
    InvalidSpec,
    JobEnded,
    JobNotFound,
    StorageUnavailable,
)
from holdfast_service.job_model import job_spec
from holdfast_service.job_model.events.codec import encode
from holdfast_service.job_model.events.progress import JobSubmittedEvent
from holdfast_service.job_model.job_spec import JobSpec
from holdfast_service.job_model.lifecycle import Desired, State
from holdfast_service.job_model.node_needs import needs_of
from holdfast_service.job_model.preparation import place_faults
from holdfast_service.job_model.program_faults import known_fields, used_fields
from holdfast_service.job_model.sort_order import Sort
from holdfast_service.job_model.supervisor_protocol import Capacity, Cluster, ClusterUnavailable
from holdfast_service.readers.goodput_cache import GoodputCache
from holdfast_service.readers.job_history import JobHistory
from holdfast_service.readers.logs import LogReader
from holdfast_service.remote_tier import location, server_store
from holdfast_service.services import code_packages, ray_access
from holdfast_service.services.code_packages import CodeService
from holdfast_service.services.data_paths import DataPaths
from holdfast_service.services.init_sources import InitSources
from holdfast_service.services.job_commands import JobCommands
from holdfast_service.settings import Settings
from holdfast_service.store import listing, queries
from holdfast_service.store.engine import Store
from holdfast_service.store.job_lookup import read_job
from holdfast_service.store.listing import Filters
from holdfast_service.store.models import Event, JobRecord
from holdfast_service.views.jobs import CancelledJobView, JobView
from holdfast_service.views.meshes import ValidSpecView, valid_spec_view
from holdfast_service.views.pages import CancelledJobPage
from holdfast_workers.spec import SpecFault

MOST_AT_ONCE = 500
"""Jobs that one call cancels at most."""
KEEP_KEYS_S = 7 * 86400.0
"""An `Idempotency-Key` that was used longer ago may be used for a new request."""
_MAX_KEY_LENGTH = 255
_PROBE_THREADS = 8
_log = structlog.get_logger()


class JobService(JobCommands):
    """The operations on jobs. Calls raise :class:`JobNotFound` for an id that belongs to no job."""

    def __init__(
        self,
        store: Store,
        cluster: Cluster,
        settings: Settings,
        notify: Callable[[str], None] = lambda _job_id: None,
        accounts: GoodputCache | None = None,
    ) -> None:
        """`accounts`: a cache shared with other services."""
        super().__init__(store, notify)
        self._cluster = cluster
        self._settings = settings
        self._crash_hook = crash_points.hook_from_setting(settings.crash_at)
        self._data_paths = DataPaths(settings, cluster)
        self._init_sources = InitSources(store, settings, self._data_paths)
        self._probe_threads = DaemonThreads(_PROBE_THREADS, "storage-probe")
        self.log_reader = LogReader(store)
        self.history = JobHistory(store, accounts or GoodputCache())

    async def submit(
        self,
        document: Mapping[str, Any],
        idempotency_key: str | None = None,
        *,
        request: Mapping[str, Any] | None = None,
    ) -> tuple[JobView, bool]:
        """The job, and True if this call created it; a repeated key and request return the first
        job, until the key expires. `request`: what was requested, if it is not the document
        itself.

        Raises InvalidSpec, IdempotencyConflict, InvalidKey, StorageUnavailable.
        """
        request = document if request is None else request
        first = await self.submitted_before(request, idempotency_key)
        if first is not None:
            return first, False
        digest = _request_digest(request)
        spec = await self.parsed(document)
        await self._check_code(spec)
        if self._settings.check_data_paths:
            await self._check_remote(spec)
        job = _new_job(spec, idempotency_key, digest, time.time())
        job.origin = await self._init_sources.resolve(spec, job.id)
        try:
            first = await self._store_job(job, digest)
        except BaseException:
            await self._release_unless_stored(job)
            raise
        if first is not None:
            await self._release_unless_stored(job)
            return first, False
        await self._crash_hook(crash_points.CrashPoint.SUBMITTED)
        self._notify(job.id)
        async with self._store.read() as session:
            return await queries.job_view(session, job), True

    async def submitted_before(
        self, request: Mapping[str, Any], idempotency_key: str | None
    ) -> JobView | None:
        """The job that an earlier call with this key and request created.

        Raises IdempotencyConflict, InvalidKey.
        """
        if idempotency_key is None:
            return None
        check_key(idempotency_key)
        return await self._find_by_key(idempotency_key, _request_digest(request))

    async def parsed(self, document: Mapping[str, Any], *, looks: bool = True) -> JobSpec:
        """The resolved spec of a document. `looks`: compared with the cluster, its data paths
        included. Raises InvalidSpec."""
        capacity = await self._capacity() if looks else None
        reading = await asyncio.to_thread(job_spec.read, document)
        faults: list[SpecFault | None] = []
        if reading.spec is not None:
            faults.append(ray_access.find_fault(reading.spec, self._settings))
            if self._settings.check_data_paths and looks:
                faults += await self._data_paths.find_faults(reading.spec)
            faults += await asyncio.to_thread(self._secret_faults, reading.spec)
        known = [fault for fault in faults if fault is not None]
        # In a thread: patterns of groups are compared with every name of a model.
        spec = await asyncio.to_thread(job_spec.check, reading, capacity, known)
        resolved = server_store.with_store(spec, self._settings)
        if misplaced := place_faults(resolved, self._settings.data_dir):
            raise InvalidSpec.of(misplaced)
        return resolved

    def _secret_faults(self, spec: JobSpec) -> list[SpecFault]:
        own = spec.has_own_model
        return [] if own else location.source_secret_faults(spec.data, self._settings.secrets_dir)

    async def _check_code(self, spec: JobSpec) -> None:
        code = CodeService(self._store, self._settings)
        if spec.code is not None and not await code.is_stored(spec.code):
            raise _no_such_code(spec.code)

    async def get(self, job_id: str) -> JobView:
        async with read_job(self._store, job_id) as (session, job):
            self._store.watched_jobs.look(job.id)
            return await queries.job_view(session, job)

    async def cancel_matching(
        self, filters: Filters, now: bool, cursor: str | None = None
    ) -> CancelledJobPage:
        """Cancel the jobs that match and have not ended, at most `MOST_AT_ONCE` by a call.

        Raises InvalidParameters without a filter: not all jobs by mistake; InvalidCursor.
        """
        if not (filters.values() or filters.states):
            why = "say which jobs: at least one of q, name, owner, state, id"
            raise InvalidParameters(why, faults=[{"path": "query", "message": why}])
        live = frozenset(state for state in State if not state.terminal)
        states = filters.states & live if filters.states else live
        if not states:
            return CancelledJobPage(items=())
        known = None if now else Desired.CANCELLED  # `now` hastens what is being cancelled already
        selected = replace(filters, states=states, not_desired=known)
        async with self._store.read(long=True) as session:
            page = await listing.page(session, selected, Sort.CREATED, MOST_AT_ONCE, cursor)
        cancelled = []
        for row in page.items:
            with contextlib.suppress(JobNotFound, JobEnded):  # it has just ended
                job = await self.cancel(row.id, now)
                cancelled.append(CancelledJobView(id=job.id, name=job.name, state=job.state))
        return CancelledJobPage(items=tuple(cancelled), next_cursor=page.next_cursor)

    async def validate(self, document: Mapping[str, Any]) -> ValidSpecView:
        """The spec that a submission of this document would resolve to, and the order of its
        meshes; no job is created.

        Raises InvalidSpec, StorageUnavailable.
        """
        spec = await self.parsed(document)
        await self._check_code(spec)
        await self.check_start(spec)
        order = await asyncio.to_thread(spec.mesh_order, _nodes_asked(document))
        return valid_spec_view(used_fields(spec), order, needs_of(spec))

    async def check_start(self, spec: JobSpec) -> None:
        """Check the checkpoint that a job of a resolved spec would start from. Raises InvalidSpec,
        StorageUnavailable."""
        await self._init_sources.resolve(spec, None)

    async def _check_remote(self, spec: JobSpec) -> None:
        """Test the remote storage now, not an hour into training. Raises InvalidSpec."""
        settings = self._settings
        remote = spec.checkpoint.remote
        fault = await location.find_storage_fault(remote, settings, self._probe_threads)
        if fault is not None:
            raise InvalidSpec.of([fault])

    async def _store_job(self, job: JobRecord, digest: str) -> JobView | None:
        """Store the job. Returns None once it is durable, or else the job that an identical call
        created before."""
        try:
            async with self._store.write() as session:
                if job.idempotency_key is not None:
                    await self._forget_expired(session, job.idempotency_key)
                session.add(job)
                await session.flush()
                session.add(_submitted_event(job))
                if job.code is not None and not await code_packages.touch(session, job.code):
                    raise _no_such_code(job.code)  # collected since the check
        except IntegrityError:
            # Two concurrent calls used the same key: the database accepted the other one.
            if job.idempotency_key is None:
                raise
            first = await self._find_by_key(job.idempotency_key, digest)
            if first is None:
                raise
            return first
        return None

    async def _release_unless_stored(self, job: JobRecord) -> None:
        """Release the initial checkpoint of a job that was not stored. If that fails, a later
        removal of the checkpoint takes the mark off."""
        try:
            async with self._store.read() as session:
                stored = await session.get(JobRecord, job.id) is not None
            if not stored:
                await self._init_sources.release(job)
        except (SQLAlchemyError, StorageUnavailable) as error:
            _log.warning(
                "cannot release the initial checkpoint of a job that was not stored",
                job=job.id,
                why=str(error),
            )

    async def _forget_expired(self, session: AsyncSession, key: str) -> None:
        await session.execute(
            update(JobRecord)
            .where(JobRecord.idempotency_key == key, JobRecord.created_at < _oldest_key())
            .values(idempotency_key=None, changed=JobRecord.changed)  # no change that users see
            .execution_options(synchronize_session=False)
        )

    async def _find_by_key(self, key: str, digest: str) -> JobView | None:
        async with self._store.read() as session:
            job = await session.scalar(select(JobRecord).where(JobRecord.idempotency_key == key))
            if job is None or job.created_at < _oldest_key():
                return None
            if job.request_digest != digest:
                raise IdempotencyConflict(
                    f"idempotency key {key!r} was used for job {job.id} with another spec: use a "
                    "new key"
                )
            return await queries.job_view(session, job)

    async def _capacity(self) -> Capacity | None:
        try:
            return await self._cluster.capacity()
        except ClusterUnavailable:
            return None  # the job is accepted all the same, and waits in the queue with that reason


def check_key(key: str) -> None:
    """Raises InvalidKey."""
    if not 0 < len(key) <= _MAX_KEY_LENGTH or not key.isprintable():
        raise InvalidKey(
            f"the idempotency key must have 1 to {_MAX_KEY_LENGTH} printable characters"
        )


def _oldest_key() -> float:
    return time.time() - KEEP_KEYS_S


def _new_job(spec: JobSpec, key: str | None, digest: str, now: float) -> JobRecord:
    return JobRecord(
        id=str(uuid_utils.uuid7()),
        name=spec.name,
        spec=known_fields(spec),
        code=spec.code,
        desired=Desired.RUNNING,
        state=State.QUEUED,
        created_at=now,
        queued_at=now,
        idempotency_key=key,
        request_digest=digest,
        step=None if spec.brings_program else 0,
        steps=(spec.program.steps if spec.brings_program else spec.train.steps) or 0,
        event_seq=1,
        owner=spec.labels.get("owner"),
        priority=spec.priority,
    )


def _nodes_asked(document: Mapping[str, Any]) -> tuple[int, int] | None:
    """The range of nodes in a document whose spec is valid; None if it names none."""
    nodes = (document.get("resources") or {}).get("nodes") or {}
    return (nodes["min"], nodes["max"]) if {"min", "max"} <= set(nodes) else None


def _no_such_code(code: str) -> InvalidSpec:
    message = f"the server has no code {code}: send it with POST /api/v1/code first"
    return InvalidSpec.of([SpecFault(path="code", message=message)])


def _submitted_event(job: JobRecord) -> Event:
    """The job's first event."""
    event = JobSubmittedEvent(name=job.name)
    return Event(
        job_id=job.id,
        seq=job.event_seq,
        at=job.created_at,
        kind=event.kind,
        data=encode(event),
    )


def _request_digest(document: object) -> str:
    canonical = json.dumps(document, sort_keys=True, default=str)
    return hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()
