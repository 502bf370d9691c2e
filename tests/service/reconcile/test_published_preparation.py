"""A job with a published model takes nodes only after its weights are read, beside its sources."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.service.fake_cluster import FakeCluster
from tests.support.service.job_drives import (
    kinds,
    reconciling,
    until,
    until_kind,
    until_state,
    until_waits,
)

from holdfast_service.job_model.lifecycle import State
from holdfast_service.job_model.preparation import PreparePhase, SourceProgress, WeightsProgress
from holdfast_service.services.jobs import JobService
from holdfast_service.settings import Settings
from holdfast_service.store.engine import Store
from holdfast_workers.spec import DataSpec, PreparedSpec, PublishedSpec, SourceSpec

ONE_NODE = {"resources": {"workers_per_node": 2}}
SOURCE = SourceSpec(path="s3://lab/web/*.parquet")
FIELDS = {
    "dim": 32,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "ffn_dim": 48,
    "vocabulary": 320,
    "norm_eps": 1e-6,
    "qkv_bias": True,
    "rope_scaling": {"type": "linear", "factor": 2.0},
}


@pytest.fixture
def folder(tmp_path: Path) -> str:
    made = tmp_path / "model"
    made.mkdir()
    return str(made)


@pytest.fixture
def document(folder: str) -> dict[str, Any]:
    data = {"sources": [{"path": SOURCE.path}]}
    model = {"from": folder, "sequence_length": 64}
    return {"name": "j", "parallel": {"dp_shard": 2}, "model": model, "data": data, **ONE_NODE}


@pytest.fixture
def weights(folder: str, settings: Settings) -> WeightsProgress:
    """All are read."""
    published = PublishedSpec(
        uri=f"{settings.data_dir.absolute()}/weights/{'1' * 32}",
        digest="1" * 32,
        manifest_bytes=900,
        nbytes=16_000_000_000,
        dtype="bfloat16",
        positions=512,
    )
    nbytes = published.nbytes
    progress = WeightsProgress(folder, nbytes, nbytes, family="qwen2", published=published)
    return replace(progress, fields=FIELDS)


def token_set(folder: str, settings: Settings, vocabulary: int = 300) -> SourceProgress:
    """Of the source, with the folder's tokenizer."""
    prepared = PreparedSpec(
        uri=f"{settings.data_dir.absolute()}/tokens/{'2' * 32}",
        origin=DataSpec(sources=(SOURCE,), tokenizer=folder).origin_of(SOURCE),
        digest="2" * 32,
        vocabulary=vocabulary,
        tokens=70_000,
    )
    return SourceProgress(SOURCE.path, PreparePhase.READY, 1, 9, 9, prepared=prepared)


async def test_a_job_is_started_with_the_sizes_and_weights_of_its_folder(
    store: Store,
    jobs: JobService,
    cluster: FakeCluster,
    settings: Settings,
    folder: str,
    document: dict[str, Any],
    weights: WeightsProgress,
) -> None:
    half = replace(weights, done_bytes=weights.total_bytes // 4, published=None, fields={})
    cluster.weights = half
    async with reconciling(store, cluster, settings):
        job, _ = await jobs.submit(document)
        await until_waits(jobs, job.id, "data")
        view = await jobs.get(job.id)
        assert view.waiting is not None
        assert view.waiting.reason == (
            f"4 GB of 16 GB of the weights of {folder} are read; its sources are being listed"
        )
        assert "dim" not in view.spec["model"], "no size is shown that is not known"
        cluster.token_sets = (token_set(folder, settings),)
        await until_kind(jobs, job.id, "data.prepared")
        assert job.id not in cluster.supervisors
        cluster.weights = weights
        await until(lambda: job.id in cluster.supervisors)
    launched = cluster.supervisors[job.id].launch.spec
    assert launched.model.source == folder
    sizes = {"sizes": launched.model.sizes_digest}
    assert weights.published is not None
    assert launched.model.published == weights.published.model_copy(update=sizes)
    assert (launched.model.dim, launched.model.qkv_bias, launched.vocabulary) == (32, True, 320)
    assert launched.model.sequence_length == 64
    assert launched.data.vocabulary == 300
    stored = (await jobs.get(job.id)).spec["model"]
    assert stored["from"] == folder
    assert (stored["dim"], stored["published"]["digest"]) == (32, "1" * 32)
    (request,) = {request.name: request for request in cluster.weights_asked}.values()
    assert request.root == str(settings.data_dir.absolute() / "weights")
    events = (await jobs.history.events(job.id, limit=1000)).items
    (event,) = [each for each in events if each.kind == "model.prepared"]
    assert (event.data["folder"], event.data["family"]) == (folder, "qwen2")
    assert [kind for kind in await kinds(jobs, job.id) if kind.endswith(".prepared")] == [
        *("data.prepared", "model.prepared")
    ]
    asked = len(cluster.weights_asked)
    again, _ = await jobs.submit({**(await jobs.get(job.id)).spec, "name": "again"})
    async with reconciling(store, cluster, settings):
        await until(lambda: again.id in cluster.supervisors)
    assert cluster.supervisors[again.id].launch.spec.model == launched.model
    assert len(cluster.weights_asked) == asked, "its weights stand in its spec"


async def test_weights_that_are_read_first_are_kept_while_the_sources_are_prepared(
    store: Store,
    jobs: JobService,
    cluster: FakeCluster,
    settings: Settings,
    folder: str,
    document: dict[str, Any],
    weights: WeightsProgress,
) -> None:
    cluster.weights = weights
    async with reconciling(store, cluster, settings):
        job, _ = await jobs.submit(document)

        async def is_read() -> bool:
            return (await jobs.get(job.id)).spec["model"]["published"] is not None

        await until(is_read)
        await until_waits(jobs, job.id, "data")
        view = await jobs.get(job.id)
        assert view.waiting is not None
        assert view.waiting.reason == "its sources are being listed"
        cluster.token_sets = (token_set(folder, settings),)
        await until(lambda: job.id in cluster.supervisors)
    assert cluster.supervisors[job.id].launch.spec.model.dim == 32


async def test_a_folder_that_is_refused_ends_the_job_before_it_takes_nodes(
    store: Store,
    jobs: JobService,
    cluster: FakeCluster,
    settings: Settings,
    folder: str,
    document: dict[str, Any],
) -> None:
    why = f"{folder} has its weights in pytorch_model.bin, a pickle"
    cluster.weights = WeightsProgress(folder, error=why)
    async with reconciling(store, cluster, settings):
        job, _ = await jobs.submit(document)
        ended = await until_state(jobs, job.id, State.FAILED)
    assert ended.outcome is not None
    assert (ended.outcome.code, ended.outcome.message) == ("model_refused", why)
    assert job.id not in cluster.starts


@pytest.mark.parametrize(
    ("changes", "tokens", "said"),
    [
        (
            {"parallel": {"tp": 3}, "resources": {"workers_per_node": 1}},
            None,
            "parallel.tp: heads 4 is not divisible by tp 3",
        ),
        (
            {"resources": {"workers_per_node": 2, "memory_per_worker_bytes": 1_000}},
            None,
            "resources.memory_per_worker_bytes: the mesh ",
        ),
        ({}, 321, "model.vocabulary: the tokenizer has 321 tokens, and the model knows 320: "),
    ],
)
async def test_a_job_that_does_not_fit_its_model_ends_before_it_takes_nodes(
    store: Store,
    jobs: JobService,
    cluster: FakeCluster,
    settings: Settings,
    folder: str,
    document: dict[str, Any],
    weights: WeightsProgress,
    changes: dict[str, Any],
    tokens: int | None,
    said: str,
) -> None:
    """As soon as that is known: no corpus is tokenized for it in vain."""
    cluster.weights = weights
    if tokens is not None:
        cluster.token_sets = (token_set(folder, settings, tokens),)
    async with reconciling(store, cluster, settings):
        job, _ = await jobs.submit({**document, **changes})
        ended = await until_state(jobs, job.id, State.FAILED)
    assert ended.outcome is not None
    assert ended.outcome.code == "model_unfit"
    assert ended.outcome.message.startswith(said)
    assert job.id not in cluster.starts
