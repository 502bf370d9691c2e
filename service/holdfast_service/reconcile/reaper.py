"""Releases cluster resources that crashes left behind; a backstop for the reconciler's clean-up.

It never changes the state of a job. It releases the resources of jobs that have ended and were
cleaned up already (a reconciler that lost its lease may have started such a job again), and of jobs
that the store does not know, if the operator says so: a database restored from a backup does not
know the jobs that were submitted after the backup.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import structlog
from sqlalchemy import select

from holdfast_service.job_model.lifecycle import State
from holdfast_service.job_model.supervisor_protocol import Cluster
from holdfast_service.store.engine import Store
from holdfast_service.store.models import JobRecord

log = structlog.get_logger(__name__)

QUERY_CHUNK = 200


@dataclass(frozen=True)
class StoredJobState:
    """The stored state of a job that has resources on the cluster."""

    state: State
    cleaned: bool


@dataclass(frozen=True)
class SweepPlan:
    """Jobs to release now, and jobs that the store does not know."""

    to_release: frozenset[str]
    unknown: frozenset[str]


def plan_sweep(
    present: Collection[str],
    known: Mapping[str, StoredJobState],
    unknown_before: Collection[str],
    release_unknown: bool,
) -> SweepPlan:
    """Select the present jobs to release.

    A job that has ended and is not cleaned is left to its driver. An unknown job is released only
    if `release_unknown`, and if the previous sweep found it unknown too.
    """
    unknown = frozenset(job for job in present if job not in known)
    ended = frozenset(
        job for job in present if job in known and known[job].state.terminal and known[job].cleaned
    )
    confirmed = unknown & frozenset(unknown_before) if release_unknown else frozenset[str]()
    return SweepPlan(to_release=ended | confirmed, unknown=unknown - confirmed)


class Reaper:
    """Compares the jobs present on the cluster with the store, and releases leftovers."""

    def __init__(self, store: Store, cluster: Cluster, release_unknown: bool) -> None:
        self._store = store
        self._cluster = cluster
        self._release_unknown = release_unknown
        self._unknown: frozenset[str] = frozenset()

    async def sweep(self, driven: Collection[str]) -> list[str]:
        """Release leftovers; returns the jobs that are completely released now.

        Jobs that are `driven` here are left to their drivers. Idempotent, also across processes.
        Raises ClusterUnavailable.
        """
        present = await self._cluster.jobs_present()
        present = {job for job in present if job not in driven}
        known = await self._standing(present)
        plan = plan_sweep(present, known, self._unknown, self._release_unknown)
        if not self._release_unknown and plan.unknown - self._unknown:
            log.warning(
                "unknown_jobs.kept",
                jobs=sorted(plan.unknown),
                advice="the database does not know these jobs of its own on the cluster, as after "
                "a restore of a backup that is older than they are; they run to their end and keep "
                "their nodes; restart with --release-unknown-jobs to end them",
            )
        self._unknown = plan.unknown
        return [job for job in sorted(plan.to_release) if await self._cluster.release(job)]

    async def _standing(self, present: Collection[str]) -> dict[str, StoredJobState]:
        ids = sorted(present)
        found: dict[str, StoredJobState] = {}
        async with self._store.read(long=True) as session:
            for start in range(0, len(ids), QUERY_CHUNK):
                chunk = ids[start : start + QUERY_CHUNK]
                rows = await session.execute(
                    select(JobRecord.id, JobRecord.state, JobRecord.cleaned).where(
                        JobRecord.id.in_(chunk)
                    )
                )
                found |= {row.id: StoredJobState(State(row.state), row.cleaned) for row in rows}
        return found
