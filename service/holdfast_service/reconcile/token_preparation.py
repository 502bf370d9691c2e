"""The token sets of a queued job's sources, made on the cluster before the job takes any node.

Nothing of it is kept here: the cluster goes on by itself, and any server may ask how far it is. The
token sets that were found become part of the job's spec, so that whatever the job does later, it
reads the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from holdfast_service.job_model.data_preparation import (
    TOKENS,
    SourceProgress,
    needs_preparation,
    refusals,
    requests_of,
    wait_text,
)
from holdfast_service.job_model.events.progress import DataPreparedEvent
from holdfast_service.job_model.job_spec import JobSpec
from holdfast_service.job_model.lifecycle import State
from holdfast_service.job_model.supervisor_protocol import Cluster
from holdfast_service.store.models import JobRecord
from holdfast_service.store.transaction import JobTransaction

LOOK_S = 1.0
"""Time between two looks at a preparation."""
WAITS_FOR = "data"
_MOST_NAMED = 20

Transaction = Callable[[], AbstractAsyncContextManager[JobTransaction]]


class TokenPreparation:
    def __init__(self, cluster: Cluster, data_dir: Path, transaction: Transaction) -> None:
        self._cluster = cluster
        self._default_root = str(data_dir.absolute() / TOKENS)
        self._transaction = transaction

    async def advance(self, job: JobRecord) -> float | None:
        """Seconds until the next look; None: the job has the token sets that it needs. Raises
        ClusterUnavailable."""
        if not job.spec.get("data", {}).get("sources"):
            return None
        spec = JobSpec.model_validate(job.spec)
        if spec.has_own_model or not needs_preparation(spec.data):
            return None
        requests = requests_of(spec.data, spec.checkpoint.remote, self._default_root)
        progress = await self._cluster.prepare_tokens(requests)
        async with self._transaction() as tx:
            if tx.state is not State.QUEUED:
                return 0.0
            if why := refusals(progress):
                tx.end(State.FAILED, "data_refused", why)
                return 0.0
            if not all(each.prepared for each in progress):
                tx.wait_for(WAITS_FOR, wait_text(progress))
                return LOOK_S
            self._keep(tx, spec, progress)
        return 0.0

    def _keep(self, tx: JobTransaction, spec: JobSpec, progress: Sequence[SourceProgress]) -> None:
        prepared = tuple(each.prepared for each in progress if each.prepared is not None)
        data = spec.data.model_copy(update={"prepared": prepared})
        waits = tx.job.waiting
        since = waits["since"] if waits and waits["resource"] == WAITS_FOR else tx.now
        bad = [each.path + ": " + text for each in progress for text in each.bad]
        tx.job.spec = {**tx.job.spec, "data": data.model_dump(mode="json")}
        tx.clear_wait(WAITS_FOR)
        tx.emit(
            DataPreparedEvent(
                sources=len(prepared),
                tokens=sum(each.tokens for each in progress),
                documents=sum(each.documents for each in progress),
                vocabulary=data.vocabulary or 0,
                took_s=tx.now - since,
                bad_count=sum(each.bad_count for each in progress),
                bad=tuple(bad[:_MOST_NAMED]),
            )
        )
