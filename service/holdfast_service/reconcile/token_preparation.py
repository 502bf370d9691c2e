"""The token sets of a queued job's sources, made on the cluster before the job takes any node.

Nothing of it is kept here: the cluster goes on by itself, and any server may ask how far it is. The
token sets that were found become part of the job's spec, so that whatever the job does later, it
reads the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager

from holdfast_service.errors import StorageUnavailable
from holdfast_service.job_model.data_preparation import (
    SourceProgress,
    needs_preparation,
    refusals,
    wait_text,
    with_token_sets,
)
from holdfast_service.job_model.events.progress import DataPreparedEvent
from holdfast_service.job_model.job_spec import JobSpec, with_data
from holdfast_service.job_model.lifecycle import DATA_WAIT, State
from holdfast_service.job_model.supervisor_protocol import Cluster
from holdfast_service.remote_tier.location import source_requests
from holdfast_service.services.init_sources import InitSources
from holdfast_service.services.token_sets import why_unfit
from holdfast_service.settings import Settings
from holdfast_service.store.models import JobRecord
from holdfast_service.store.transaction import JobTransaction

LOOK_S = 1.0
"""Time between two looks at a preparation."""
_MOST_NAMED = 20

Transaction = Callable[[], AbstractAsyncContextManager[JobTransaction]]


class TokenPreparation:
    def __init__(
        self, cluster: Cluster, settings: Settings, sources: InitSources, transaction: Transaction
    ) -> None:
        self._cluster = cluster
        self._settings = settings
        self._sources = sources
        self._transaction = transaction

    async def advance(self, job: JobRecord) -> float | None:
        """Seconds until the next look; None: the job has the token sets that it needs. Raises
        ClusterUnavailable."""
        if not job.spec.get("data", {}).get("sources"):
            return None
        spec = JobSpec.model_validate(job.spec)
        if spec.has_own_model or not needs_preparation(spec.data):
            return None
        progress = await self._cluster.prepare_tokens(source_requests(spec, self._settings))
        data, unfit = with_token_sets(spec.data, progress), ""
        known = None if data is None else with_data(spec, data)
        if known is not None:
            try:
                origin = job.origin
                unfit = await why_unfit(known, lambda s: self._sources.check_again(s, origin))
            except StorageUnavailable as error:
                async with self._transaction() as tx:
                    if tx.state is State.QUEUED:
                        tx.wait_for(
                            "storage", f"the checkpoint of `init_from` must be read: {error}"
                        )
                return LOOK_S
        async with self._transaction() as tx:
            if tx.state is not State.QUEUED:
                return 0.0
            if why := refusals(progress):
                tx.end(State.FAILED, "data_refused", why)
            elif unfit:
                tx.end(State.FAILED, "data_unfit", unfit)
            elif known is not None:
                self._keep(tx, known, progress)
            else:
                tx.wait_for(DATA_WAIT, wait_text(progress))
                return LOOK_S
        return 0.0

    def _keep(self, tx: JobTransaction, spec: JobSpec, progress: Sequence[SourceProgress]) -> None:
        waits = tx.job.waiting
        since = waits["since"] if waits and waits["resource"] == DATA_WAIT else tx.now
        bad = [each.path + ": " + text for each in progress for text in each.bad]
        trained = progress[: len(spec.data.sources)]
        apart = progress[len(trained) :]
        tx.job.spec = {**tx.job.spec, **spec.model_dump(mode="json", include={"data", "train"})}
        tx.job.steps = spec.train.last_step
        tx.clear_wait(DATA_WAIT)
        tx.emit(
            DataPreparedEvent(
                sources=len(trained),
                tokens=sum(each.tokens for each in trained),
                documents=sum(each.documents for each in trained),
                vocabulary=spec.data.vocabulary or 0,
                took_s=tx.now - since,
                validation_tokens=sum(each.held_out_tokens for each in trained)
                + sum(each.tokens for each in apart),
                bad_count=sum(each.bad_count for each in progress),
                bad=tuple(bad[:_MOST_NAMED]),
            )
        )
