"""Proof of bits: a replay computes the steps of a job again, undisturbed, on the same meshes. Its
digests are compared with those of the job.

A replay is a job like any other; see `job_model/replay.py` for its spec.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import aclosing

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_service.errors import NotAReplay, NothingToReplay
from holdfast_service.job_model.lifecycle import State
from holdfast_service.job_model.mesh_history import MeshSpan, mesh_history, since, until
from holdfast_service.job_model.replay import ReplayMark, replay_document, replay_mark
from holdfast_service.readers.replay_comparison import ReplayedRun, ReplayProgress, compare
from holdfast_service.services.jobs import JobService, check_key
from holdfast_service.store import series
from holdfast_service.store.engine import Store
from holdfast_service.store.job_lookup import canonical, find_job, read_job, spec_of
from holdfast_service.store.models import AttemptRow, JobRecord
from holdfast_service.store.statement import JOB, Statement
from holdfast_service.views.comparison import ComparisonView
from holdfast_service.views.jobs import JobView

MAX_STEPS = 10_000
"""Most steps that one call compares."""

_MESHES = Statement(
    select(AttemptRow.restore["step"].as_integer(), AttemptRow.mesh)
    .where(AttemptRow.job_id == JOB, AttemptRow.world_size > 0)
    .order_by(AttemptRow.number)
)


class ReplayService:
    """Calls raise JobNotFound for an id that belongs to no job."""

    def __init__(self, store: Store, jobs: JobService) -> None:
        self._store = store
        self._jobs = jobs

    async def replay(self, job_id: str, idempotency_key: str | None = None) -> tuple[JobView, bool]:
        """Submit a replay of the steps that the job has committed so far. The replay, and True if
        this call created it; a repeated key returns the first.

        Raises NothingToReplay, SpecUnreadable, InvalidSpec if the job could not be submitted today,
        and the errors of :meth:`JobService.submit`.
        """
        request = {"replay_of": job_id}
        if idempotency_key is not None:  # apart from the keys of submissions
            check_key(idempotency_key)
            digest = hashlib.sha256(f"{canonical(job_id)} {idempotency_key}".encode()).hexdigest()
            idempotency_key = f"replay:{digest}"
        first = await self._jobs.submitted_before(request, idempotency_key)
        if first is not None:
            return first, False
        async with read_job(self._store, job_id) as (session, job):
            spec = spec_of(job)
            if spec.brings_program:
                raise NothingToReplay(
                    f"job {job_id} runs a program, whose state has no digests: only recipes and "
                    "functions can be verified"
                )
            if not spec.checkpoint.digest_every_steps:
                raise NothingToReplay(
                    f"job {job_id} has no digests to compare: submit it with "
                    "checkpoint.digest_every_steps of 1 or more"
                )
            if spec.train.deterministic == "fast":
                raise NothingToReplay(
                    f"job {job_id} has train.deterministic fast: two healthy runs of it may differ "
                    "in their last bits, so a replay proves nothing; submit it with strict"
                )
            newest = await series.newest_digest(session, job_id)
            last_step = min(newest or 0, job.step or 0)
            if not last_step:
                raise NothingToReplay(
                    f"job {job_id} has committed no step with a digest yet: wait for its first "
                    f"{spec.checkpoint.digest_every_steps} steps"
                )
            history = until(await _meshes(session, job), last_step)
            mark = ReplayMark(job.id, last_step)
            document = replay_document(spec, mark, history, job.origin, job.packages)
        return await self._jobs.submit(document, idempotency_key, request=request)

    async def compare(
        self, job_id: str, after_step: int = 0, limit: int = MAX_STEPS
    ) -> ComparisonView:
        """Compare at most `limit` steps after `after_step` of a replay with the job that it
        replays. Raises NotAReplay."""
        async with read_job(self._store, job_id) as (session, replay):
            mark = replay_mark(replay.spec)
            if mark is None:
                raise NotAReplay(
                    f"job {job_id} is no replay: POST /api/v1/jobs/{job_id}/replay starts one"
                )
            original = await find_job(session, mark.original)
            steps = range(after_step + 1, min(mark.until_step, after_step + limit) + 1)
            progress = await _progress(session, replay, mark)
            # Digests before meshes: a digest is never newer than the attempt that computed it.
            digests = [await _digests(session, job, steps) for job in (original, replay)]
            meshes = [await _meshes(session, job) for job in (original, replay)]
        ours, theirs = (ReplayedRun(*pair) for pair in zip(meshes, digests, strict=True))
        return compare(mark, progress, ours, theirs, steps)


async def _progress(session: AsyncSession, replay: JobRecord, mark: ReplayMark) -> ReplayProgress:
    newest = await series.newest_digest(session, replay.id) or 0
    has_ended = State(replay.state).terminal
    if has_ended:  # no further digest will come
        newest = max(newest, replay.step or 0)
    return ReplayProgress(replay.id, min(newest, mark.until_step), has_ended)


async def _digests(session: AsyncSession, job: JobRecord, steps: range) -> dict[int, str]:
    found = {}
    async with aclosing(series.read_digests(session, job.id, steps.start - 1)) as stored:
        async for step, digest in stored:
            if step >= steps.stop:
                break
            found[step] = digest
    return found


async def _meshes(session: AsyncSession, job: JobRecord) -> Sequence[MeshSpan]:
    attempts = await _MESHES.all(session, job=job.id)
    history = mesh_history((restored or 0, mesh) for restored, mesh in attempts)
    return since(history, job.origin["step"] if job.origin else 0)
