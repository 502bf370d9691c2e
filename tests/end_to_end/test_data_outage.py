"""A bucket that hangs while a job reads its token sets, which are larger than the node's cache."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.end_to_end.conftest import ONE_NODE, Product, served, spec
from tests.support.checkpoint.s3_server import CREDENTIALS, S3Server
from tests.support.data.token_sets import MadeSet, random_shards

from holdfast_service.job_model.lifecycle import DATA_WAIT
from holdfast_workers.checkpoint.open_storage import open_storage
from holdfast_workers.node_cache.cached_file import LIMIT_VARIABLE
from holdfast_workers.protocol.processes import StorageOptions
from holdfast_workers.spec.train import DataSpec, SourceSpec

pytestmark = [pytest.mark.cluster, pytest.mark.chaos, pytest.mark.timeout(400)]
SOURCE = SourceSpec(path="/texts/*.txt")
MADE = MadeSet("texts", random_shards(1, [500 + n for n in range(20)]))
GROUP_BYTES = 2 * max(shard.nbytes for shard in MADE.shards)
LIMIT_BYTES = len(MADE.facts.encode()) + 3 * GROUP_BYTES
"""Six of the twenty shards."""
STEPS = 80
"""Four epochs."""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    """A product whose node's cache is smaller than the corpus."""
    folder = tmp_path_factory.mktemp("small")
    with served(folder, nodes=1, **{LIMIT_VARIABLE: f"{LIMIT_BYTES / 1e9:.9f}"}) as started:
        yield started


def job(name: str, root: str, remote: dict[str, Any]) -> dict[str, Any]:
    """Its token set is below `root`."""
    made = MADE.prepared(f"{root}/{MADE.facts.digest}")
    made = made.model_copy(update={"origin": DataSpec().origin_of(SOURCE)})
    data = DataSpec(sources=(SOURCE,), prepared=(made,), shuffle_gb=GROUP_BYTES / 1e9)
    return spec(
        name=name,
        data=data.model_dump(mode="json"),
        train={**spec()["train"], "steps": STEPS},
        checkpoint={"memory": {"every_steps": 1}, "remote": {**remote, "every_steps": 0}},
        **ONE_NODE,
    )


def test_a_bucket_that_hangs_in_the_middle_of_an_epoch_costs_time_only(
    small: Product, s3_server: S3Server
) -> None:
    client, bucket = small.client, s3_server.new_bucket()
    tokens = small.data_dir / "tokens"
    MADE.store(tokens / MADE.facts.digest)
    undisturbed = client.submit(job("undisturbed", str(tokens), {})).id
    secret = small.data_dir / "secrets" / "lab.json"
    secret.parent.mkdir(mode=0o700, exist_ok=True)
    access = {**CREDENTIALS, "bucket": bucket, "endpoint": s3_server.endpoint}
    secret.write_text(json.dumps(access))
    secret.chmod(0o600)
    root = f"s3://{bucket}/runs/tokens"
    options = StorageOptions(endpoint=s3_server.endpoint, credentials=CREDENTIALS)
    MADE.write_to(open_storage(f"{root}/{MADE.facts.digest}", options))
    assert small.finish(undisturbed).state == "SUCCEEDED"
    remote = {"uri": f"s3://{bucket}/runs", "secret": "lab", "endpoint": s3_server.endpoint}
    hung = client.submit(job("hung", root, remote)).id
    small.wait_step(hung, 5)
    with s3_server.hanging():
        small.wait(lambda: stands(small, hung))
        stopped_at = client.get(hung).progress.step
        assert stopped_at is not None and 5 <= stopped_at < STEPS
        small.wait(lambda: "ReadTimeoutError" in log_of(small, hung, "fetcher"))
        assert "waits for data file=shard-" in log_of(small, hung, small.members(hung)[0].worker)
        whole = client.get(hung)
        assert (whole.state, whole.progress.step) == ("RUNNING", stopped_at)
        assert stands(small, hung)
    ended = small.finish(hung)
    assert ended.state == "SUCCEEDED", ended.outcome
    assert client.digests(hung) == client.digests(undisturbed)
    assert small.samples(hung) == small.samples(undisturbed)
    assert not client.incidents(hung)
    assert len(client.attempts(hung)) == 1


def stands(product: Product, job_id: str) -> bool:
    """Whether the job says that it waits for data, and which rank does."""
    waiting = product.client.get(job_id).waiting
    return waiting is not None and waiting.resource == DATA_WAIT and "rank" in waiting.reason


def log_of(product: Product, job_id: str, process: str | None) -> str:
    lines = product.client.logs(job_id).items
    return "\n".join(line.text for line in lines if line.worker == process)
