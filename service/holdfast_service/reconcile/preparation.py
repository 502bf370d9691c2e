"""What a queued job reads, prepared on the cluster before the job takes any node: the token sets of
its sources, and the weights of its published model.

Nothing of it is kept here: the cluster goes on by itself, and any server may ask how far it is.
What was found becomes part of the job's spec, so that whatever the job does later, it reads the
same tokens and begins with the same weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager

from holdfast_service.errors import StorageUnavailable
from holdfast_service.job_model.events.progress import DataPreparedEvent, ModelPreparedEvent
from holdfast_service.job_model.job_spec import JobSpec, with_data
from holdfast_service.job_model.lifecycle import DATA_WAIT, State
from holdfast_service.job_model.preparation import (
    SourceProgress,
    WeightsProgress,
    needs_preparation,
    refusals,
    wait_text,
    with_token_sets,
    with_weights,
)
from holdfast_service.job_model.supervisor_protocol import Cluster
from holdfast_service.remote_tier.location import request_of_weights, source_requests
from holdfast_service.services.init_sources import InitSources
from holdfast_service.services.token_sets import why_unfit
from holdfast_service.settings import Settings
from holdfast_service.store.models import JobRecord
from holdfast_service.store.transaction import JobTransaction

LOOK_S = 1.0
"""Time between two looks at a preparation."""
_MOST_NAMED = 20

Transaction = Callable[[], AbstractAsyncContextManager[JobTransaction]]


class Preparation:
    def __init__(
        self, cluster: Cluster, settings: Settings, sources: InitSources, transaction: Transaction
    ) -> None:
        self._cluster = cluster
        self._settings = settings
        self._sources = sources
        self._transaction = transaction

    async def advance(self, job: JobRecord) -> float | None:
        """Seconds until the next look; None: the job has the token sets and the weights that it
        needs. Raises ClusterUnavailable."""
        if not job.spec.get("data", {}).get("sources"):
            return None  # a published model has sources too
        spec = JobSpec.model_validate(job.spec)
        if spec.has_own_model:
            return None
        tokens, weights = await asyncio.gather(self._tokens(spec), self._weights(spec))
        if tokens is None and weights is None:
            return None
        known, unfit = _known(spec, tokens, weights), ""
        waits = DATA_WAIT, _wait_text(tokens, weights)
        if known is not spec:
            try:
                origin = job.origin
                unfit = await why_unfit(known, lambda s: self._sources.check_again(s, origin))
            except StorageUnavailable as error:
                known = spec
                waits = "storage", f"the checkpoint of `init_from` must be read: {error}"
        async with self._transaction() as tx:
            if tx.state is not State.QUEUED:
                return 0.0
            if why := refusals(tokens or ()):
                tx.end(State.FAILED, "data_refused", why)
            elif weights is not None and weights.error:
                tx.end(State.FAILED, "model_refused", weights.refusal)
            elif unfit:
                code = "data_unfit" if spec.model.source is None else "model_unfit"
                tx.end(State.FAILED, code, unfit)
            elif known is not spec:
                self._keep(tx, known, tokens, weights)
            else:
                tx.wait_for(*waits)
                return LOOK_S
        return 0.0

    async def _tokens(self, spec: JobSpec) -> tuple[SourceProgress, ...] | None:
        """None: they are there."""
        if not needs_preparation(spec.data):
            return None
        return await self._cluster.prepare_tokens(source_requests(spec, self._settings))

    async def _weights(self, spec: JobSpec) -> WeightsProgress | None:
        """None: they are there, or the model begins with none."""
        request = request_of_weights(spec, self._settings)
        return None if request is None else await self._cluster.prepare_weights(request)

    def _keep(
        self,
        tx: JobTransaction,
        spec: JobSpec,
        tokens: Sequence[SourceProgress] | None,
        weights: WeightsProgress | None,
    ) -> None:
        """Store what is ready, as the spec has it now."""
        waits = tx.job.waiting
        since = waits["since"] if waits and waits["resource"] == DATA_WAIT else tx.now
        changed = spec.model_dump(mode="json", include={"data", "train", "model"})
        is_read = spec.model.has_sizes
        tx.job.spec = {**tx.job.spec, **changed}
        tx.job.steps = spec.train.last_step
        if is_read and not needs_preparation(spec.data):
            tx.clear_wait(DATA_WAIT)
        if weights is not None and is_read:
            tx.emit(_model_event(weights, tx.now - since))
        if tokens is not None and spec.data.prepared:
            tx.emit(_data_event(spec, tokens, tx.now - since))


def _known(
    spec: JobSpec, tokens: Sequence[SourceProgress] | None, weights: WeightsProgress | None
) -> JobSpec:
    """The spec with what is ready; the same one if nothing is."""
    data = None if tokens is None else with_token_sets(spec.data, tokens)
    model = None if weights is None else with_weights(spec.model, weights)
    known = spec if data is None else with_data(spec, data)
    return known if model is None else known.model_copy(update={"model": model})


def _wait_text(tokens: Sequence[SourceProgress] | None, weights: WeightsProgress | None) -> str:
    texts = [] if weights is None else [weights.text]
    return "; ".join(texts if tokens is None else [*texts, wait_text(tokens)])


def _model_event(weights: WeightsProgress, took_s: float) -> ModelPreparedEvent:
    published = weights.published
    assert published is not None
    return ModelPreparedEvent(
        folder=weights.path,
        family=weights.family,
        nbytes=published.nbytes,
        digest=published.digest,
        took_s=took_s,
    )


def _data_event(
    spec: JobSpec, progress: Sequence[SourceProgress], took_s: float
) -> DataPreparedEvent:
    bad = [each.path + ": " + text for each in progress for text in each.bad]
    trained = progress[: len(spec.data.sources)]
    apart = progress[len(trained) :]
    return DataPreparedEvent(
        sources=len(trained),
        tokens=sum(each.tokens for each in trained),
        documents=sum(each.documents for each in trained),
        vocabulary=spec.data.vocabulary or 0,
        took_s=took_s,
        validation_tokens=sum(each.held_out_tokens for each in trained)
        + sum(each.tokens for each in apart),
        bad_count=sum(each.bad_count for each in progress),
        bad=tuple(bad[:_MOST_NAMED]),
    )
