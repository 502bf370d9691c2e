"""A corpus larger than the cache of its nodes, whose shards come by groups, through faults."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from tests.support.checkpoint.s3_server import CREDENTIALS, S3Server
from tests.support.data.token_sets import MadeSet, random_shards
from tests.support.nodes import own_processes
from tests.support.nodes.history_proof import incidents
from tests.support.nodes.supervised import SupervisedRun, small_training, supervised

from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_workers.checkpoint.open_storage import open_storage
from holdfast_workers.data.sample_order import samples_digest
from holdfast_workers.data.token_cache import shard_file
from holdfast_workers.data.token_corpus import order_of
from holdfast_workers.node_cache.cached_file import LIMIT_VARIABLE
from holdfast_workers.protocol.messages import StepRow
from holdfast_workers.protocol.processes import StorageOptions
from holdfast_workers.spec import DataSpec, PreparedSpec, TrainingSpec

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]
STEPS = 80
MADE = MadeSet("web", random_shards(1, [500 + n for n in range(20)]))
GROUP_BYTES = 2 * max(shard.nbytes for shard in MADE.shards)
"""Two shards, of eight windows each."""


def training(store: Path) -> TrainingSpec:
    return reading(MADE.store(store))


def reading(made: PreparedSpec) -> TrainingSpec:
    data = DataSpec(prepared=(made,), shuffle_gb=GROUP_BYTES / 1e9)
    return small_training(STEPS, data=data)


def access_to(server: S3Server) -> StorageOptions:
    return StorageOptions(
        endpoint=server.endpoint, credentials=CREDENTIALS, read_timeout_s=1.0, patience_s=3.0
    )


def assert_each_token_once(spec: TrainingSpec, rows: Mapping[int, StepRow]) -> None:
    """The rows have the samples of the order: each once in an epoch."""
    order = order_of(spec.data, [MADE.facts], spec.model.sequence_length, spec.train.seed)
    batch = spec.train.global_batch
    assert STEPS * batch >= 1.5 * order.samples
    samples = order.samples_at(np.arange(STEPS * batch))
    assert len(set(samples[: order.samples].tolist())) == order.samples
    for step in range(1, STEPS + 1):
        positions = np.arange((step - 1) * batch, step * batch)
        expected = samples_digest(positions, samples[positions])
        assert rows[step].samples == f"{expected:016x}", step


def fetchers() -> set[int]:
    """The fetching processes of this test's agents."""
    return {process.pid for process in own_processes.named("hf-fetcher")}


def cached(run: SupervisedRun) -> int:
    """The most shards that the cache of a node has."""
    caches = {Path(agent.config.cache_dir) for agent in run.agents.agents.values()}
    return max(sum(shard_file(cache, s).exists() for s in MADE.shards) for cache in caches)


@pytest.mark.cell("P2", "token fetcher")
def test_a_corpus_larger_than_the_cache_is_read_through_faults_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3_server: S3Server
) -> None:
    """The bucket hangs meanwhile, as its server is stopped, and a node is lost then."""
    spec = training(tmp_path / "store")
    for name in ("undisturbed", "small"):
        (tmp_path / name).mkdir()
    with supervised(tmp_path / "undisturbed", spec, standbys=0) as run:
        assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
        assert cached(run) == len(MADE.shards)
        expected = dict(run.digests)
        assert_each_token_once(spec, run.rows)
    limit = len(MADE.facts.encode()) + 3 * GROUP_BYTES
    monkeypatch.setenv(LIMIT_VARIABLE, f"{limit / 1e9:.9f}")
    bucket, storage = f"s3://{s3_server.new_bucket()}", access_to(s3_server)
    made = MADE.prepared(f"{bucket}/tokens/{MADE.facts.digest}")
    MADE.write_to(open_storage(made.uri, storage))
    options = {"remote": f"{bucket}/job", "storage": storage}
    with supervised(tmp_path / "small", reading(made), standbys=1, **options) as run:
        run.wait_step(10)
        assert 0 < cached(run) <= 6
        run.wait(lambda: len(fetchers()) == 3)
        killed = fetchers()
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        run.wait_step(25)
        run.kill(1)
        run.wait(lambda: len(incidents(run)) == 1)
        seen = run.newest_step()
        with s3_server.hanging():
            run.wait(lambda: any("waits for data" in line for line in run.logs))
            run.wait(lambda: any("ReadTimeoutError" in line for line in run.logs))
            assert run.newest_step() < STEPS
            run.agents.kill_node(run.seat_of(0))
            run.wait(lambda: len(run.of(EventKind.INCIDENT_OPENED)) == 2)
        assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
        assert seen < STEPS
        assert cached(run) <= 6
        assert not killed & fetchers()
        assert run.digests == expected, run.story()
        assert_each_token_once(spec, run.rows)
        assert len(incidents(run)) == 2, "a wait for data is none"


def test_a_rank_that_waits_for_data_ends_the_attempt_with_its_reason_before_its_peers_do(
    tmp_path: Path,
) -> None:
    """Their collectives would fail, and not say why."""
    spec = training(tmp_path / "store")
    detection = spec.detection.model_copy(update={"collective_timeout_s": 6.0})
    (tmp_path / "store" / MADE.shards[3].object_name).unlink()
    with supervised(tmp_path, spec.model_copy(update={"detection": detection}), standbys=0) as run:
        run.wait(lambda: bool(run.of(EventKind.INCIDENT_OPENED)))
        why = run.of(EventKind.INCIDENT_OPENED)[0]["evidence"][0]
        assert "DataUnavailable" in why
        assert "did not come into the cache" in why
        assert f"of the node {socket.gethostname()} within " in why
