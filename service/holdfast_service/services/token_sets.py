"""What users do with the data of a spec before a job: prepare it, and look at its samples."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from holdfast_service.errors import ClusterUnreachable, DataUnreadable, InvalidSpec
from holdfast_service.job_model.job_spec import JobSpec, prepared_faults, with_data
from holdfast_service.job_model.preparation import with_token_sets
from holdfast_service.job_model.supervisor_protocol import Cluster, ClusterUnavailable
from holdfast_service.remote_tier.location import source_requests
from holdfast_service.services.jobs import JobService
from holdfast_service.settings import Settings
from holdfast_service.views.token_sets import DataPreparationView, DataSamplesView, SampleView
from holdfast_workers.spec import SpecFault

MOST_SAMPLES = 100


async def why_unfit(spec: JobSpec, check_start: Callable[[JobSpec], Awaitable[object]]) -> str:
    """Why a job of a spec with token sets cannot train on them, on one line; "" if it can.
    `check_start`: of its `init_from`, raises InvalidSpec. Raises StorageUnavailable."""
    found = await asyncio.to_thread(prepared_faults, spec)
    faults = [f"{fault.path}: {fault.message}" for fault in found]
    if not faults:
        try:
            await check_start(spec)
        except InvalidSpec as error:
            faults = [f"{fault['path']}: {fault['message']}" for fault in error.faults]
    return "; ".join(faults)


class TokenSetService:
    def __init__(self, jobs: JobService, cluster: Cluster, settings: Settings) -> None:
        self._jobs = jobs
        self._cluster = cluster
        self._settings = settings

    async def prepare(self, document: Mapping[str, Any]) -> DataPreparationView:
        """Begin to prepare the sources of a spec, or go on, and say how far they are; to be asked
        again until they are done: without a question, the work ends after a while. Raises
        InvalidSpec, ClusterUnreachable, StorageUnavailable."""
        spec = await self._spec_with_sources(document)
        try:
            progress = await self._cluster.prepare_tokens(source_requests(spec, self._settings))
        except ClusterUnavailable as error:
            raise ClusterUnreachable(str(error)) from error
        data = with_token_sets(spec.data, progress)
        ready = None if data is None else with_data(spec, data)
        unfit = "" if ready is None else await why_unfit(ready, self._jobs.check_start)
        return DataPreparationView.of(progress, spec, ready, unfit)

    async def samples(self, document: Mapping[str, Any], count: int) -> DataSamplesView:
        """The first samples of a spec with prepared sources, as text. Raises InvalidSpec,
        ClusterUnreachable, DataUnreadable."""
        spec = await self._spec_with_sources(document)
        if not spec.data.prepared:
            message = "the sources are not prepared yet: run holdfast data prepare with this spec"
            raise InvalidSpec.of([SpecFault(path="data.prepared", message=message)])
        try:
            found = await self._cluster.read_samples(spec, min(count, MOST_SAMPLES))
        except ClusterUnavailable as error:
            raise ClusterUnreachable(str(error)) from error
        if found.error:
            raise DataUnreadable(found.error)
        return DataSamplesView(
            samples=tuple(SampleView.from_attributes(sample) for sample in found.samples)
        )

    async def _spec_with_sources(self, document: Mapping[str, Any]) -> JobSpec:
        spec = await self._jobs.parsed(document, looks=False)  # the preparation does
        if not spec.data.sources:
            message = "the spec has no data.sources: there is nothing to prepare"
            raise InvalidSpec.of([SpecFault(path="data.sources", message=message)])
        return spec
