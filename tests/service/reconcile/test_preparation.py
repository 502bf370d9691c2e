"""A job with sources takes nodes only after their token sets are there."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.support.service.fake_cluster import FakeCluster
from tests.support.service.job_drives import (
    JOB,
    kinds,
    reconciling,
    until,
    until_released,
    until_state,
    until_waits,
)

from holdfast_service.job_model.lifecycle import State
from holdfast_service.job_model.preparation import PreparePhase, SourceProgress, SourceRequest
from holdfast_service.job_model.supervisor_protocol import ClusterUnavailable
from holdfast_service.services.jobs import JobService
from holdfast_service.settings import Settings
from holdfast_service.store.engine import Store
from holdfast_workers.spec import DataSpec, PreparedSpec, SourceSpec, SpecialTokenSpec

SOURCE = SourceSpec(path="s3://lab/web/*.parquet", text="content")
DATA = DataSpec(sources=(SOURCE,))
SOURCES: dict[str, Any] = {"sources": [{"path": SOURCE.path, "text": SOURCE.text}]}
WITH_SOURCES = {**JOB, "data": SOURCES}
PREPARED = PreparedSpec(
    uri="/store/tokens/1",
    origin=DATA.origin_of(SOURCE),
    digest="0" * 32,
    vocabulary=256,
    tokens=70_000,
    sequence_length=256,
    samples=275,
    tokenizer="2" * 32,
    document_end=0,
)
READY = SourceProgress(
    SOURCE.path,
    PreparePhase.READY,
    1,
    9,
    9,
    tokens=70_000,
    prepared=PREPARED,
    special_tokens={"document_end": SpecialTokenSpec(id=0)},
)


async def test_a_job_is_started_with_the_token_sets_of_its_sources(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    cluster.token_sets = (READY,)
    async with reconciling(store, cluster, settings):
        job, _ = await jobs.submit(WITH_SOURCES)
        await until(lambda: job.id in cluster.supervisors)
    assert cluster.supervisors[job.id].launch.spec.data.prepared == (PREPARED,)
    view = await jobs.get(job.id)
    assert view.spec["data"]["prepared"][0]["digest"] == PREPARED.digest
    assert view.reads is not None
    assert view.reads.tokenizer == f"bytes, 256 tokens, digest {'2' * 32}, document_end 0"
    assert "data.prepared" in await kinds(jobs, job.id)
    (request,) = cluster.sources_asked
    assert request.data.sources == (SOURCE,)
    assert request.root == str(settings.data_dir.absolute() / "tokens")


async def test_files_of_validation_are_prepared_beside_the_sources(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    apart = {"path": "s3://lab/held-out.parquet"}
    origin = DATA.origin_of(SourceSpec.model_validate(apart))
    made = PREPARED.model_copy(update={"origin": origin, "digest": "1" * 32, "tokens": 3})
    cluster.token_sets = (READY, replace(READY, path=apart["path"], tokens=3, prepared=made))
    async with reconciling(store, cluster, settings):
        job, _ = await jobs.submit({**WITH_SOURCES, "data": {**SOURCES, "validation": apart}})
        await until(lambda: job.id in cluster.supervisors)
    data = cluster.supervisors[job.id].launch.spec.data
    assert data.prepared == (PREPARED,)
    assert data.validation is not None
    assert data.validation.prepared == made
    assert [request.apart_from for request in cluster.sources_asked] == [(), (SOURCE,)]
    events = (await jobs.history.events(job.id, limit=1000)).items
    (event,) = [each for each in events if each.kind == "data.prepared"]
    assert (event.data["tokens"], event.data["validation_tokens"]) == (READY.tokens, 3)


async def test_a_share_without_any_document_ends_the_job_before_it_takes_nodes(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    share = {**SOURCES, "validation": {"share": 0.01}}
    origin = DataSpec.model_validate(share).origin_of(SOURCE)
    made = PREPARED.model_copy(update={"origin": origin})
    cluster.token_sets = (replace(READY, prepared=made),)
    async with reconciling(store, cluster, settings):
        job, _ = await jobs.submit({**WITH_SOURCES, "data": share})
        ended = await until_state(jobs, job.id, State.FAILED)
    assert ended.outcome is not None
    assert ended.outcome.code == "data_unfit"
    assert ended.outcome.message.startswith(
        "data.validation.share: none of the sources' documents is in the share of 0.01"
    )


async def test_a_job_whose_data_is_refused_ends_before_it_takes_nodes(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    why = "part-7.parquet has no column 'content': set text to one of: body, title"
    cluster.token_sets = (SourceProgress(SOURCE.path, PreparePhase.REFUSED, error=why),)
    async with reconciling(store, cluster, settings):
        job, _ = await jobs.submit(WITH_SOURCES)
        ended = await until_state(jobs, job.id, State.FAILED)
    assert ended.outcome is not None
    assert ended.outcome.code == "data_refused"
    assert ended.outcome.message == f"{SOURCE.path}: {why}"
    assert job.id not in cluster.starts


async def test_a_job_whose_mesh_does_not_fit_the_vocabulary_ends_before_it_takes_nodes(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    odd = PREPARED.model_copy(update={"vocabulary": 257})
    cluster.token_sets = (replace(READY, prepared=odd),)
    document = {**WITH_SOURCES, "parallel": {"tp": 2, "vocabulary_parallel": True}}
    async with reconciling(store, cluster, settings):
        job, _ = await jobs.submit(document)
        ended = await until_state(jobs, job.id, State.FAILED)
    assert ended.outcome is not None
    assert ended.outcome.code == "data_unfit"
    assert ended.outcome.message == (
        "parallel.vocabulary_parallel: the vocabulary of 257 is not divisible by tp 2: use another "
        "tp, or remove vocabulary_parallel"
    )
    assert job.id not in cluster.starts


async def test_the_steps_of_epochs_are_known_from_the_preparation_on(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    root = settings.data_dir.absolute() / "tokens"
    prepared = PREPARED.model_copy(update={"uri": f"{root}/{'1' * 32}"})
    async with reconciling(store, cluster, settings):
        job, _ = await jobs.submit({**WITH_SOURCES, "train": {"epochs": 2.5}})
        await until_waits(jobs, job.id, "data")
        waiting = await jobs.get(job.id)
        assert (waiting.progress.steps, waiting.spec["train"]["steps"]) == (None, None)
        cluster.token_sets = (replace(READY, prepared=prepared),)
        await until(lambda: job.id in cluster.supervisors)
    launched = cluster.supervisors[job.id].launch.spec
    assert (launched.train.epochs, launched.train.steps) == (2.5, 43)  # 687.5 samples
    known = await jobs.get(job.id)
    assert known.progress.steps == 43
    again, _ = await jobs.submit({**known.spec, "name": "again"})
    assert again.progress.steps == 43


async def test_a_job_whose_epochs_are_shorter_than_its_warm_up_ends_before_it_takes_nodes(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    cluster.token_sets = (READY,)
    async with reconciling(store, cluster, settings):
        job, _ = await jobs.submit({**WITH_SOURCES, "train": {"epochs": 1}})
        ended = await until_state(jobs, job.id, State.FAILED)
    assert ended.outcome is not None
    assert (ended.outcome.code, ended.outcome.message) == (
        "data_unfit",
        "train.schedule.warmup_steps: warmup_steps 20 exceeds steps 18",
    )
    assert job.id not in cluster.starts


async def test_no_wait_follows_the_end_of_a_job_that_is_cancelled_during_the_question(
    store: Store,
    jobs: JobService,
    cluster: FakeCluster,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    submitted, asked = asyncio.Event(), asyncio.Event()

    async def prepare_tokens(requests: Sequence[SourceRequest]) -> tuple[SourceProgress, ...]:
        await submitted.wait()
        asked.set()
        await jobs.cancel(job.id)
        raise ClusterUnavailable("it is away")

    monkeypatch.setattr(cluster, "prepare_tokens", prepare_tokens)
    async with reconciling(store, cluster, settings):
        job, _ = await jobs.submit(WITH_SOURCES)
        submitted.set()
        await asked.wait()
        await until_state(jobs, job.id, State.CANCELLED)
        await until_released(jobs, job.id)
    assert "waiting" not in await kinds(jobs, job.id)


async def test_a_job_says_how_far_its_data_is_and_keeps_no_other_from_nodes(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    cluster.token_sets = (
        SourceProgress(
            SOURCE.path,
            PreparePhase.TOKENIZING,
            files=3,
            total_bytes=8_000_000_000,
            done_bytes=2_000_000_000,
            bytes_per_s=1e7,
            tokens=500_000_000,
        ),
    )
    async with reconciling(store, cluster, settings):
        waits, _ = await jobs.submit(WITH_SOURCES)
        await until_waits(jobs, waits.id, "data")
        view = await jobs.get(waits.id)
        assert view.waiting is not None
        assert view.waiting.reason == (
            "2 GB of 8 GB of its sources are tokens: 500,000,000 so far, about 2,000,000,000 in "
            "the end, about 10 min 0 s left"
        )
        other, _ = await jobs.submit(JOB)
        await until(lambda: other.id in cluster.supervisors)
        await jobs.cancel(waits.id)
        await until_state(jobs, waits.id, State.CANCELLED)
        assert waits.id not in cluster.starts
