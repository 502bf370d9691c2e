"""Releases cluster resources that crashes left behind; a backstop for the reconciler's clean-up.

It never changes the state of a job. It releases the resources of jobs that are over: that have
ended and were cleaned up already (a reconciler that lost its lease may have started such a job
again), or were removed since; and of jobs that the store does not know, if the operator says so: a
database restored from a backup does not know the jobs that were submitted after the backup.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import structlog
from sqlalchemy import select

from holdfast_service.job_model.lifecycle import State
from holdfast_service.job_model.supervisor_protocol import Cluster
from holdfast_service.store.engine import Store
from holdfast_service.store.models import JobRecord, RemovedJob

log = structlog.get_logger(__name__)

QUERY_CHUNK = 200


@dataclass(frozen=True)
class SweepPlan:
    """Jobs to release now, and all jobs that the store does not know."""

    to_release: frozenset[str]
    unknown: frozenset[str]


def plan_sweep(
    present: Collection[str],
    over: Mapping[str, bool],
    unknown_before: Collection[str],
    release_unknown: bool,
) -> SweepPlan:
    """Select the present jobs to release.

    `over`: of each job that the store knows, whether nothing of it may be on the cluster. A job
    that has ended and is not cleaned is left to its driver. An unknown job is released only if
    `release_unknown`, and if the previous sweep found it unknown too.
    """
    confirmed = unknown_before if release_unknown else ()
    return SweepPlan(
        to_release=frozenset(job for job in present if over.get(job, job in confirmed)),
        unknown=frozenset(job for job in present if job not in over),
    )


class Reaper:
    """Compares the jobs present on the cluster with the store, and releases leftovers."""

    def __init__(self, store: Store, cluster: Cluster, release_unknown: bool) -> None:
        self._store = store
        self._cluster = cluster
        self._release_unknown = release_unknown
        self._unknown: frozenset[str] = frozenset()
        self._unfinished: frozenset[str] = frozenset()
        """Jobs whose release needs a further pass, although the cluster may not show them again:
        what dead agents left in shared memory has no name there."""

    async def sweep(self, driven: Collection[str]) -> list[str]:
        """Release leftovers; returns the jobs that are completely released now.

        Jobs that are `driven` here are left to their drivers. Idempotent, also across processes.
        Raises ClusterUnavailable.
        """
        found = self._unfinished | await self._cluster.jobs_present()
        present = {job for job in found if job not in driven}
        over = await self._over(present)
        plan = plan_sweep(present, over, self._unknown, self._release_unknown)
        if not self._release_unknown and plan.unknown - self._unknown:
            log.warning(
                "unknown_jobs.kept",
                jobs=sorted(plan.unknown),
                advice="the database does not know these jobs of its own on the cluster, as after "
                "a restore of a backup that is older than they are; they run to their end and keep "
                "their nodes; restart with --release-unknown-jobs to end them",
            )
        self._unknown, self._unfinished = plan.unknown, plan.to_release
        released = [job for job in sorted(plan.to_release) if await self._cluster.release(job)]
        self._unfinished -= set(released)
        return released

    async def _over(self, present: Collection[str]) -> dict[str, bool]:
        """Job -> whether it has ended and was cleaned up, or was removed; of the jobs that the
        store knows."""
        ids = sorted(present)
        over: dict[str, bool] = {}
        async with self._store.read(long=True) as session:
            for start in range(0, len(ids), QUERY_CHUNK):
                chunk = ids[start : start + QUERY_CHUNK]
                removed = select(RemovedJob.id).where(RemovedJob.id.in_(chunk))
                over |= dict.fromkeys(await session.scalars(removed), True)
                columns = select(JobRecord.id, JobRecord.state, JobRecord.cleaned)
                for row in await session.execute(columns.where(JobRecord.id.in_(chunk))):
                    over[row.id] = State(row.state).terminal and row.cleaned
        return over
