"""What one may do with jobs: the calls that the REST layer translates to.

Everything is read from and written to the store; the cluster is asked for its capacity alone.
A submitted job is durable when :meth:`JobService.submit` returns.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hashlib
import json
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from typing import Any
from uuid import UUID

import structlog
import uuid_utils
from sqlalchemy import select
from sqlalchemy.exc import IntegrityError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_service import crash_points
from holdfast_service.job_model.admission import stored_world_size
from holdfast_service.job_model.goodput import History
from holdfast_service.job_model.job_errors import (
    IdempotencyConflict,
    InvalidCursor,
    InvalidKey,
    SpecUnreadable,
    UnknownMetric,
)
from holdfast_service.job_model.job_spec import InvalidSpec, JobSpec, parse
from holdfast_service.job_model.lifecycle import Desired, State
from holdfast_service.job_model.log_filters import LogFilter
from holdfast_service.job_model.supervisor_protocol import Capacity, Cluster, ClusterUnavailable
from holdfast_service.readers.goodput_cache import KeptAccounts
from holdfast_service.readers.logs import LogReader
from holdfast_service.readers.metric_series import (
    METRICS,
    Row,
    charted,
    point,
    share,
    thinned,
    with_extremes,
)
from holdfast_service.remote_tier import location
from holdfast_service.remote_tier.storage_calls import StorageNotAnswering
from holdfast_service.services import job_commands
from holdfast_service.services.code_packages import CodeService
from holdfast_service.services.init_sources import Origins
from holdfast_service.settings import Settings
from holdfast_service.store import accounts, json_safe, queries, series
from holdfast_service.store.engine import Store
from holdfast_service.store.job_lookup import find_job, spec_of
from holdfast_service.store.models import Event, Job
from holdfast_service.views.goodput import GoodputView
from holdfast_service.views.jobs import (
    AttemptView,
    DigestPage,
    DiscardedView,
    EventPage,
    IncidentView,
    JobPage,
    JobView,
    LogPage,
    MetricPage,
)
from holdfast_workers.spec import Fault

_LONGEST_KEY = 255
_ACCOUNTS_KEPT_S = 60.0
_MOST_DISCARDED = 1000
_MOST_ATTEMPTS_DISCARDED = 100
_log = structlog.get_logger()


class JobService:
    """All calls raise :class:`JobNotFound` for an id that was never given out."""

    def __init__(
        self,
        store: Store,
        cluster: Cluster,
        settings: Settings,
        notify: Callable[[str], None] = lambda _job_id: None,
        accounts: KeptAccounts | None = None,
    ) -> None:
        """`notify(job_id)`: there is something to do for the job, for a reconciler in this
        process; others find out by themselves. `accounts`: those that other services made."""
        self._store = store
        self._cluster = cluster
        self._settings = settings
        self._crossing = crash_points.chosen(settings.crash_at)
        self._notify = notify
        self._origins = Origins(store, settings)
        self.log_reader = LogReader(store, settings)
        self._goodputs: dict[str, tuple[float, GoodputView]] = {}
        self._accounts = accounts or KeptAccounts()

    async def submit(
        self, document: Mapping[str, Any], idempotency_key: str | None = None
    ) -> tuple[JobView, bool]:
        """The job, and True if this call created it; the same key and document: the first job.

        Raises InvalidSpec, IdempotencyConflict, InvalidKey, StorageNotAnswering.
        """
        digest = _request_digest(document)
        if idempotency_key is not None:
            if not 0 < len(idempotency_key) <= _LONGEST_KEY or not idempotency_key.isprintable():
                raise InvalidKey(f"an idempotency key has 1 to {_LONGEST_KEY} printable characters")
            first = await self._submitted_before(idempotency_key, digest)
            if first is not None:
                return first, False
        capacity = await self._capacity()
        # Looking for a data path may take a slow file system's time.
        spec = await asyncio.to_thread(
            parse, document, capacity, check_paths=self._settings.check_data_paths
        )
        if self._settings.check_data_paths:
            await self._check_remote(spec)
        await self._check_code(spec)
        job = _new_job(spec, idempotency_key, digest, time.time())
        job.origin = await self._origins.resolve(spec, job.id)
        try:
            first = await self._stored(job, digest)
        except BaseException:
            await self._let_go_unless_stored(job)
            raise
        if first is not None:
            await self._let_go_unless_stored(job)
            return first, False
        await self._crossing(crash_points.Point.SUBMITTED)
        self._notify(job.id)
        async with self._store.read() as session:
            return await queries.job_view(session, job), True

    async def _check_code(self, spec: JobSpec) -> None:
        code = CodeService(self._store, self._settings)
        if spec.code is not None and not await code.is_there(spec.code):
            message = f"there is no code {spec.code} here: send it with POST /api/v1/code first"
            raise InvalidSpec([Fault(path="code", message=message)])

    async def get(self, job_id: str) -> JobView:
        async with self._store.read() as session:
            return await queries.job_view(session, await find_job(session, job_id))

    async def cancel(self, job_id: str, now: bool = False) -> JobView:
        """See :func:`desires.cancel`."""
        return await self._wanted(job_commands.cancel(self._store, job_id, now))

    async def pause(self, job_id: str) -> JobView:
        """See :func:`desires.pause`."""
        return await self._wanted(job_commands.pause(self._store, job_id))

    async def resume(self, job_id: str) -> JobView:
        """See :func:`desires.resume`."""
        return await self._wanted(job_commands.resume(self._store, job_id))

    async def attempts(self, job_id: str) -> Sequence[AttemptView]:
        """Oldest first."""
        async with self._store.read() as session:
            await find_job(session, job_id)
            return await queries.attempt_views(session, job_id)

    async def incidents(self, job_id: str) -> Sequence[IncidentView]:
        """Oldest first."""
        async with self._store.read() as session:
            job = await find_job(session, job_id)
            lost: Mapping[int, float] = {}
            with contextlib.suppress(SpecUnreadable):  # how many devices it has is not known then
                lost = await self._lost(session, job) if job.incidents else {}
            return await queries.incident_views(session, job_id, lost)

    async def goodput(self, job_id: str, max_age_s: float = 0.0) -> GoodputView:
        """Where the job's time went so far. It is read from every row of every step: one that is
        not older than `max_age_s` is good enough for whoever asks often. Raises SpecUnreadable."""
        known = self._goodputs.get(job_id)
        if known is not None and time.monotonic() - known[0] < max_age_s:
            return known[1]
        async with self._store.read() as session:
            return await self._account(session, await find_job(session, job_id))

    async def events(self, job_id: str, after: int = 0, limit: int = 200) -> EventPage:
        """Events with a number above `after`, at most `limit`, at once."""
        async with self._store.read() as session:
            job = await find_job(session, job_id)
            events = await queries.event_views(session, job_id, after, limit)
        last = events[-1].seq if events else after
        state = State(job.state)
        return EventPage(
            events=tuple(events),
            last_seq=last,
            state=state,
            ended=state.terminal and last >= job.event_seq,
        )

    async def wait_events(
        self, job_id: str, after: int = 0, limit: int = 200, timeout_s: float = 15.0
    ) -> EventPage:
        """As :meth:`events`, but waits up to `timeout_s` for the first one; then an empty page.

        Returns at once when the job is over: `ended` tells a stream to close.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            page = await self.events(job_id, after, limit)
            left = deadline - time.monotonic()
            if page.events or page.ended or left <= 0:
                return page
            # No session is held while waiting, and any process may have written the event.
            await asyncio.sleep(min(left, self._settings.event_poll_s))

    async def metrics(
        self,
        job_id: str,
        names: Collection[str] | None = None,
        after_step: int = 0,
        limit: int = 1000,
        max_points: int | None = None,
        points: int | None = None,
        until_step: int | None = None,
        discarded: bool = False,
    ) -> MetricPage:
        """The committed history: one point per step, of the latest attempt that made it.

        `names` None: all. `max_points`: every k-th point of the whole rest of the series and the
        last one, instead of a page of `limit`; `points`: those in which something is extreme.
        `discarded`: with what a rollback threw away. Raises UnknownMetric.
        """
        found: list[Row] = []
        more = False
        thrown: Mapping[int, Sequence[Row]] = {}
        async with self._store.read() as session:
            job = await find_job(session, job_id)
            wanted = _wanted_metrics(job, names)
            if points is not None:
                until = job.steps if until_step is None else until_step
                found = await self._charted(session, job, wanted, after_step, until, points)
            else:
                async with aclosing(series.read_rows(session, job_id, after_step)) as rows:
                    async for row in rows:
                        if until_step is not None and row[0] > until_step:
                            break
                        if max_points is None and len(found) == limit:
                            more = True
                            break
                        found.append(row)
            if discarded:
                history = History(await accounts.runs(session, job.id, set()))
                thrown = await series.read_discarded(session, job.id, after_step, history)
        if max_points is not None and points is None:
            found = thinned(found, max_points)
        return MetricPage(
            names=wanted,
            points=tuple(point(wanted, *row) for row in found),
            last_step=found[-1][0] if found else after_step,
            more=more,
            discarded=tuple(
                DiscardedView(
                    attempt=attempt,
                    points=tuple(
                        point(wanted, *row)
                        for row in with_extremes(
                            rows, wanted, share(len(rows), found, points or _MOST_DISCARDED)
                        )
                    ),
                )
                for attempt, rows in sorted(thrown.items())[-_MOST_ATTEMPTS_DISCARDED:]
            ),
        )

    async def _charted(
        self,
        session: AsyncSession,
        job: Job,
        names: Sequence[str],
        after_step: int,
        until_step: int,
        points: int,
    ) -> list[Row]:
        """From outlines where a bucket of the chart is no shorter than a chunk."""
        last = min(until_step, max(job.step, job.cursor_step))
        buckets = max(1, points // (2 * len(charted(names))))
        if (last - after_step) // series.WINDOW > buckets:
            rows = await series.read_outlined(session, job.id, after_step, until_step)
        else:
            rows = []
            async with aclosing(series.read_rows(session, job.id, after_step)) as stored:
                async for row in stored:
                    if row[0] > until_step:
                        break
                    rows.append(row)
        if len(rows) <= points:
            return rows  # as `with_extremes` would
        return await asyncio.to_thread(with_extremes, rows, names, points)

    async def logs(
        self,
        job_id: str,
        *,
        rank: int | None = None,
        attempt: int | None = None,
        after: int = 0,
        limit: int = 1000,
        tail: int | None = None,
    ) -> LogPage:
        """Lines with a number above `after`; or the last `tail` lines that match."""
        wanted = LogFilter(rank=rank, attempt=attempt)
        return await self.log_reader.page(job_id, wanted, after=after, limit=limit, tail=tail)

    async def validate(self, document: Mapping[str, Any]) -> JobSpec:
        """The spec that a submission of this document would resolve to; nothing is made.

        Raises InvalidSpec, StorageNotAnswering.
        """
        capacity = await self._capacity()
        spec = await asyncio.to_thread(
            parse, document, capacity, check_paths=self._settings.check_data_paths
        )
        await self._check_code(spec)
        await self._origins.resolve(spec, None)
        return spec

    async def digests(self, job_id: str, after_step: int = 0, limit: int = 10_000) -> DigestPage:
        """Digest of the whole state after each step, of the committed history."""
        found: dict[int, str] = {}
        more = False
        async with self._store.read() as session:
            await find_job(session, job_id)
            async with aclosing(series.read_digests(session, job_id, after_step)) as stored:
                async for step, digest in stored:
                    if len(found) == limit:
                        more = True
                        break
                    found[step] = digest
        return DigestPage(digests=found, last_step=max(found, default=after_step), more=more)

    async def list(
        self,
        cursor: str | None = None,
        limit: int = 50,
        state: Collection[State] | None = None,
        name: str | None = None,
        ids: Collection[str] | None = None,
    ) -> JobPage:
        """Newest first. `name` matches exactly; `ids`: of these alone. Raises InvalidCursor."""
        query = select(Job).order_by(Job.id.desc()).limit(limit + 1)
        if cursor is not None:
            query = query.where(Job.id < _from_cursor(cursor))
        if state:
            query = query.where(Job.state.in_(state))
        if name is not None:
            query = query.where(Job.name == json_safe.text(name))
        if ids:
            query = query.where(Job.id.in_([json_safe.text(one) for one in ids]))
        async with self._store.read() as session:
            jobs = (await session.scalars(query)).all()
            page = await queries.job_views(session, jobs[:limit])
        return JobPage(
            jobs=tuple(page),
            next_cursor=_to_cursor(page[-1].id) if len(jobs) > limit else None,
        )

    async def _lost(self, session: AsyncSession, job: Job) -> Mapping[int, float]:
        """Incident → device-seconds that it cost."""
        told = await self._accounts.of(session, job)
        devices = stored_world_size(job.spec)
        return {one: took * devices for one, took in told.lost_s.items() if one is not None}

    async def _account(self, session: AsyncSession, job: Job) -> GoodputView:
        told = await accounts.goodput(session, job, time.time())
        devices = spec_of(job).parallel.world_size
        view = queries.goodput_view(job, told, devices)
        oldest = time.monotonic() - _ACCOUNTS_KEPT_S
        fresh = {key: one for key, one in self._goodputs.items() if one[0] > oldest}
        self._goodputs = {**fresh, job.id: (time.monotonic(), view)}
        return view

    async def _check_remote(self, spec: JobSpec) -> None:
        """Better now than after an hour. Raises InvalidSpec."""
        settings = self._settings
        remote = spec.checkpoint.remote
        fault = await location.fault_of(remote, settings.secrets_dir, settings.storage_probe_s)
        if fault is not None:
            raise InvalidSpec([fault])

    async def _stored(self, job: Job, digest: str) -> JobView | None:
        """None: it is durable. Otherwise the job that the same call made a moment before."""
        try:
            async with self._store.write() as session:
                session.add(job)
                await session.flush()
                session.add(_submitted(job))
        except IntegrityError:
            # Two calls with one key at the same moment: the database let one of them through.
            if job.idempotency_key is None:
                raise
            first = await self._submitted_before(job.idempotency_key, digest)
            if first is None:
                raise
            return first
        return None

    async def _let_go_unless_stored(self, job: Job) -> None:
        """Nothing is kept for a job that there is not. A mark that stays all the same is taken off
        by whoever removes the checkpoint."""
        try:
            async with self._store.read() as session:
                stored = await session.get(Job, job.id) is not None
            if not stored:
                await self._origins.let_go(job)
        except (SQLAlchemyError, StorageNotAnswering) as error:
            _log.warning("the mark of a job that was not stored stays", job=job.id, why=str(error))

    async def _wanted(self, asking: Awaitable[JobView]) -> JobView:
        job = await asking
        self._notify(job.id)
        return job

    async def _submitted_before(self, key: str, digest: str) -> JobView | None:
        async with self._store.read() as session:
            job = await session.scalar(select(Job).where(Job.idempotency_key == key))
            if job is None:
                return None
            if job.request_digest != digest:
                raise IdempotencyConflict(
                    f"idempotency key {key!r} was used for job {job.id} with another spec"
                )
            return await queries.job_view(session, job)

    async def _capacity(self) -> Capacity | None:
        try:
            return await self._cluster.capacity()
        except ClusterUnavailable:
            return None  # accepted all the same; it waits in the queue and says for what


def _new_job(spec: JobSpec, key: str | None, digest: str, now: float) -> Job:
    return Job(
        id=str(uuid_utils.uuid7()),
        name=spec.name,
        spec=spec.model_dump(mode="json"),
        code=spec.code,
        desired=Desired.RUNNING,
        state=State.QUEUED,
        created_at=now,
        idempotency_key=key,
        request_digest=digest,
        steps=spec.train.steps,
        step=0,
        event_seq=1,
        owner=spec.labels.get("owner"),
        productive_s=0.0,
    )


def _submitted(job: Job) -> Event:
    """The first of its events."""
    return Event(
        job_id=job.id,
        seq=job.event_seq,
        at=job.created_at,
        kind="job.submitted",
        data={"name": job.name},
    )


def _wanted_metrics(job: Job, names: Collection[str] | None) -> tuple[str, ...]:
    """Those named; all that the job has if none are. Raises UnknownMetric."""
    there = (*METRICS, *job.own_metrics)
    if names is None:
        return there
    for name in names:
        if name not in there:
            raise UnknownMetric(
                f"there is no metric {name!r}: use {', '.join(there)}; a function's own numbers "
                "are there once it has told them by ctx.step(metrics=...)"
            )
    return tuple(dict.fromkeys(names))


def _request_digest(document: object) -> str:
    canonical = json.dumps(document, sort_keys=True, default=str)
    return hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()


def _to_cursor(job_id: str) -> str:
    return base64.urlsafe_b64encode(UUID(job_id).bytes).decode().rstrip("=")


def _from_cursor(cursor: str) -> str:
    try:
        raw = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4))
        return str(UUID(bytes=raw))
    except (ValueError, binascii.Error) as error:
        raise InvalidCursor(f"{cursor[:64]!r} is no cursor of a list of jobs") from error
