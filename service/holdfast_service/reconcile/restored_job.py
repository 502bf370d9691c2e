"""What becomes of a job of a restored database: the cluster may know more about it than the backup.

The job may run on, with steps that the database lacks; it may have been started or resumed since
the backup, or have ended. It is asked for once, before anything else happens to it. A job that may
have gone on and is gone now is paused: only its user knows whether it is to continue.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from holdfast_service.job_model.events.progress import JobReleasedEvent
from holdfast_service.job_model.job_spec import JobSpec
from holdfast_service.job_model.lifecycle import Desired, State
from holdfast_service.job_model.supervisor_protocol import Cluster, SupervisorUnavailable
from holdfast_service.remote_tier.location import remote_uri
from holdfast_service.remote_tier.storage_calls import StorageCalls
from holdfast_service.settings import Settings
from holdfast_service.store import projection
from holdfast_service.store.models import JobRecord
from holdfast_service.store.transaction import Effect, JobTransaction
from holdfast_workers.checkpoint.fence_objects import is_newest_epoch

WAITS = "restored: something of the job is on the cluster, and its supervisor does not answer yet"
_ADOPTED = "restored: its supervisor runs on the cluster"
_GONE = "restored: its supervisor is gone; resume continues from its newest checkpoint"
_RAN_SINCE = "restored: it has run since the backup; resume continues from its newest checkpoint"


class Verdict(Enum):
    GO_ON = auto()
    """Drive it as any other job."""
    ADOPT = auto()
    """The job is on the cluster, although the backup has it queued or paused."""
    WAIT = auto()
    """The job's supervisor may be starting again."""
    PAUSE = auto()


@dataclass(frozen=True)
class Sighting:
    """Observations of a job after the restore."""

    answers: bool
    """Whether the job's supervisor answered."""
    is_present: bool
    """Something of it is on the cluster."""
    ran_since: bool = False
    """Whether the job's remote storage has the mark of a later supervisor than the backup. It is
    only looked for if the backup has the job queued."""


def judge(state: State, desired: Desired, seen: Sighting, *, patient: bool) -> Verdict:
    """`patient`: a silent supervisor still has time to answer. Pure."""
    if seen.answers or seen.is_present:
        if state.on_cluster:
            return Verdict.GO_ON
        return Verdict.WAIT if patient and not seen.answers else Verdict.ADOPT
    if state is State.QUEUED:
        return Verdict.PAUSE if seen.ran_since else Verdict.GO_ON
    if not state.on_cluster or desired is Desired.CANCELLED:
        return Verdict.GO_ON
    return Verdict.PAUSE


class RestoredJobs:
    """Looks for jobs of a restored database."""

    def __init__(self, cluster: Cluster, settings: Settings) -> None:
        self._cluster = cluster
        self._settings = settings
        self._storage_calls = StorageCalls(settings)

    async def look_for(self, job: JobRecord) -> Sighting:
        """Raises ClusterUnavailable and StorageUnavailable."""
        try:
            await self._cluster.poll(job.id, projection.cursors_of(job))
            return Sighting(answers=True, is_present=True)
        except SupervisorUnavailable:
            is_present = job.id in await self._cluster.jobs_present()
        ran_since = False
        if not is_present and job.state == State.QUEUED:
            ran_since = await self._ran_since(job)
        return Sighting(False, is_present, ran_since)

    async def _ran_since(self, job: JobRecord) -> bool:
        named = JobSpec.model_validate(job.spec).checkpoint.remote.uri
        uri = remote_uri(named, self._settings.job_dir(job.id))
        storage = self._storage_calls.storage_at(uri, job.spec)
        return not await self._storage_calls.run(is_newest_epoch, storage, job.epoch)


async def adopt(tx: JobTransaction) -> None:
    """The job is on the cluster: its supervisor is found by its name when it is requested."""
    if tx.state is State.PAUSED:
        tx.job.desired = Desired.RUNNING  # it was resumed since the backup
        tx.transition(State.QUEUED, reason=_ADOPTED)
    (await tx.record_intent(Effect.START)).done_at = None
    tx.transition(State.STARTING, reason=_ADOPTED)


async def pause(tx: JobTransaction) -> None:
    """The job may have gone on since the backup, and nothing of it is on the cluster."""
    at, on_cluster = tx.job.told_at, tx.state.on_cluster
    tx.job.desired = Desired.PAUSED
    tx.job.slow = {}
    if on_cluster and tx.state is not State.PAUSING:
        tx.transition(State.PAUSING, reason=_GONE, at=at)
    if on_cluster:
        tx.emit(JobReleasedEvent())
    await tx.forget_intents(Effect.START, Effect.PAUSE, Effect.RELEASE)
    tx.transition(State.PAUSED, reason=_GONE if on_cluster else _RAN_SINCE, at=at)
