"""A Ray cluster that Holdfast did not start, whose nodes share no folder with the server.

The nodes do not see the server's data directory: checkpoints, fences and the record of injected
faults are in a bucket, and caches are each node's own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.support.checkpoint.s3_server import CREDENTIALS, S3Server
from tests.support.nodes.port_ranges import free_range
from tests.support.service.external_cluster import ExternalCluster, can_hide, external_cluster

from holdfast import Client, InvalidSpec
from holdfast_workers.ipc.listening import RANGE_VARIABLE

STEPS = 12
JOB = {
    "name": "apart",
    "model": {"dim": 32, "layers": 1, "heads": 2, "kv_heads": 1, "sequence_length": 32},
    "train": {"steps": STEPS, "global_batch": 4, "micro_batch": 2, "schedule": {"warmup_steps": 2}},
    "parallel": {"dp_shard": 2},
    "resources": {"workers_per_node": 1},
    "checkpoint": {"remote": {"every_steps": 6}},
}


@contextmanager
def serving(
    data_dir: Path, cluster: ExternalCluster, bucket: str, s3: S3Server
) -> Iterator[Callable[[], str]]:
    """A server of that cluster, whose store is the bucket. Yields a wait for its address."""
    secret = {**CREDENTIALS, "bucket": bucket, "endpoint": s3.endpoint}
    (data_dir / "secrets").mkdir(mode=0o700)
    file = data_dir / "secrets" / "store.json"
    file.touch(0o600)
    file.write_text(json.dumps(secret))
    environ = {
        **os.environ,
        "HOLDFAST_STORE_ENDPOINT": s3.endpoint,
        "HOLDFAST_STORE_SECRET": "store",
        "HOLDFAST_ALLOW_LOCAL_STORAGE": "true",
    }
    command = [
        *(sys.executable, "-m", "holdfast", "serve", "--json", "--port", "0"),
        *("--data-dir", str(data_dir), "--ray-address", cluster.address),
        *("--store-uri", f"s3://{bucket}/lab", "--allow-fault-injection"),
    ]
    with (data_dir / "server.log").open("wb") as log:
        server = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=log)
    assert server.stdout is not None
    answer = server.stdout

    def address() -> str:
        line = answer.readline()
        assert line, (data_dir / "server.log").read_text()
        return str(json.loads(line)["address"])

    try:
        yield address
    finally:
        server.terminate()
        server.wait(60)
        answer.close()


@pytest.mark.soak
@pytest.mark.cluster
@pytest.mark.chaos
@pytest.mark.timeout(180)
def test_a_job_runs_on_nodes_that_do_not_see_the_servers_folder(
    tmp_path: Path, s3_server: S3Server
) -> None:
    bucket, data_dir = s3_server.new_bucket(), tmp_path / "server"
    data_dir.mkdir()
    (data_dir / "text.txt").write_text("seen by the server only")
    with (
        external_cluster(data_dir, {RANGE_VARIABLE: str(free_range(20))}, head_cpus=1) as cluster,
        serving(data_dir, cluster, bucket, s3_server) as address,
    ):
        cluster.add_node(cpus=1)  # meanwhile the server starts
        with Client(address(), data_dir=data_dir) as client:
            if can_hide():
                with pytest.raises(InvalidSpec, match="does not exist on the node"):
                    client.submit({**JOB, "data": {"source": str(data_dir / "text.txt")}})
            job = client.submit(JOB)
            assert job.spec["checkpoint"]["remote"]["uri"] == f"s3://{bucket}/lab"
            client.inject(job.id, "supervisor_death")
            ended = client.wait(job.id, 90)
            assert ended.state == "SUCCEEDED", client.verdict(job.id)
            assert sorted(client.digests(job.id)) == [*range(1, STEPS + 1)]
            stored = s3_server.objects(bucket)
            assert stored and all(name.startswith(f"lab/{job.id}/") for name in stored)
            faults = [name for name in stored if "/fence/fault-" in name]
            assert faults == [f"lab/{job.id}/fence/fault-00000001"]
            saved = client.checkpoints(job.id).items
            assert [checkpoint.step for checkpoint in saved] == [STEPS, 6]
            *_, verified = client.verify_checkpoint(job.id, STEPS)
            assert verified.state == "SUCCEEDED" and verified.bad is None
            assert client.export_checkpoint(job.id, STEPS, tmp_path / "m.safetensors")
            assert list(client.all_logs(job.id))
            for node in cluster.nodes:
                assert [*node.folder.glob(".cache/holdfast/tokens-*.bin")], "of the node's own"
    assert not (data_dir / "jobs").exists() and not (data_dir / "cache").exists()
