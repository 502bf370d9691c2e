"""A server on a Ray cluster with a real autoscaler: nodes come for jobs, and go."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

START = """
import contextlib, json, os, signal, subprocess, sys
from pathlib import Path
import ray
from ray.autoscaler.sdk import request_resources
from ray.autoscaler.v2.sdk import get_cluster_resource_state
from tests.support.service.autoscaled_cluster import autoscaled_cluster
from tests.support.waiting import eventually
from holdfast import Client

folder = Path(sys.argv[1])
(folder / "store").mkdir()
JOB = {
    "name": "grown",
    "model": {"dim": 32, "layers": 1, "heads": 2, "kv_heads": 1, "sequence_length": 32},
    "data": {"source": "python-stdlib", "tokenizer": "bytes"},
    "train": {"steps": 4, "global_batch": 4, "micro_batch": 2, "schedule": {"warmup_steps": 2}},
    "parallel": {"dp_shard": 1},
    "resources": {"workers_per_node": 1, "cpus_per_worker": 1},
}
KINDS = {"worker": {"CPU": 1}, "other": {"CPU": 0, "other": 1}}

def nodes(resource):
    return sum(node["Resources"].get(resource, 0) > 0 for node in ray.nodes() if node["Alive"])

@contextlib.contextmanager
def served(bound):
    with autoscaled_cluster(KINDS, idle_s=12.0) as address:
        command = [sys.executable, "-m", "holdfast", "serve", "--json", "--port", "0",
                   "--data-dir", str(folder / "server"), "--ray-address", address, "--store-uri",
                   str(folder / "store"), "--autoscale", "--autoscale-nodes", str(bound)]
        server = subprocess.Popen(command, stdout=subprocess.PIPE,
                                  stderr=(folder / "server.log").open("wb"),
                                  env={**os.environ, "HOLDFAST_PACE__NODE_LOOK_S": "1"})
        ray.init(address, log_to_driver=False)
        line = server.stdout.readline()
        assert line, (folder / "server.log").read_text()
        with Client(json.loads(line)["address"], data_dir=folder / "server") as client:
            yield server, client
        ray.shutdown()
"""

QUEUED = """
LARGE = {**JOB, "name": "large", "parallel": {"dp_shard": 4},
         "train": {**JOB["train"], "global_batch": 8}}
HUGE = {**JOB, "name": "huge", "resources": {"workers_per_node": 1, "cpus_per_worker": 64}}
with served(bound=2) as (server, client):
    request_resources(bundles=[{"other": 1}])  # of another program

    def asked():
        groups = ray.util.placement_group_table().values()
        return [group["name"] for group in groups
                if group["name"].startswith("wanted:") and group["state"] != "REMOVED"]

    def others():
        state = get_cluster_resource_state(ray._private.worker.global_worker.gcs_client)
        return [dict(each.request.resources_bundle) for constraint
                in state.cluster_resource_constraints for each in constraint.resource_requests]

    def waiting(job):
        return client.get(job.id).waiting

    job = client.submit(JOB)
    eventually(lambda: waiting(job) and waiting(job).asked, failure_message=lambda: waiting(job))
    assert "it was asked for 1 more node with 1 CPU" in waiting(job).reason, waiting(job)
    large = client.submit(LARGE)
    bound = "it would have 5 nodes, and HOLDFAST_AUTOSCALE_NODES allows 2"
    eventually(lambda: waiting(large) and bound in waiting(large).reason)
    client.cancel(large.id)
    ended = client.wait(job.id, 60)
    assert ended.state == "SUCCEEDED", client.verdict(job.id)
    assert nodes("CPU") == 1
    huge = client.submit(HUGE)
    eventually(asked, failure_message="no request")
    client.cancel(huge.id)
    eventually(lambda: not asked(), failure_message="the request is left")
    eventually(lambda: not nodes("CPU"), failure_message="the node has not gone")
    huge = client.submit({**HUGE, "name": "again"})
    eventually(asked, failure_message="no request")
    server.send_signal(signal.SIGKILL)
    server.wait()
    eventually(lambda: not asked(), failure_message="the request outlives the server")
    assert nodes("other") == 1 and others() == [{"other": 1.0}], (ray.nodes(), others())
"""

ELASTIC = """
FOR_LONG = {**JOB["train"], "steps": 100_000}

with served(bound=3) as (server, client):
    def sizes(job):
        return [attempt.world_size for attempt in client.attempts(job.id)]

    job = client.submit({**JOB, "name": "elastic", "parallel": {"dp_shard": "auto"},
                         "resources": {**JOB["resources"], "nodes": {"min": 1, "max": 2}},
                         "recovery": {"grow_after_s": 0.3, "grow_min_gain": -1},
                         "train": FOR_LONG})
    eventually(lambda: sizes(job)[-1:] == [2], 90, lambda: sizes(job))
    assert nodes("CPU") == 2, "a node for each rank, and none besides"
    client.cancel(job.id)
    client.wait(job.id, 60)
    eventually(lambda: not nodes("CPU"), 60, "the nodes have not gone")

    job = client.submit({**JOB, "name": "three", "parallel": {"dp_shard": 2},
                         "resources": {**JOB["resources"], "standby_nodes": 1}})
    ended = client.wait(job.id, 120)
    assert ended.state == "SUCCEEDED", client.verdict(job.id)
    assert nodes("CPU") == 3, "two nodes for ranks, and a standby"
"""


pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("unshare") is None,
        reason="only root may make PID namespaces, with `unshare`",
    ),
]


def test_nodes_come_for_a_queued_job_and_go_and_other_requests_stay(tmp_path: Path) -> None:
    run_apart(QUEUED, tmp_path)


@pytest.mark.soak
def test_nodes_come_for_an_elastic_job_and_for_a_standby(tmp_path: Path) -> None:
    run_apart(ELASTIC, tmp_path)


def run_apart(program: str, folder: Path) -> None:
    """In a PID namespace: the provider of the fake nodes ends all of Ray that it finds."""
    apart = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    ran = subprocess.run(
        [*apart, sys.executable, "-c", START + program, str(folder)],
        capture_output=True,
        text=True,
        timeout=350,
        check=False,
        env={**os.environ, "RAY_AUTH_MODE": "disabled"},
    )
    log = folder / "server.log"
    server = log.read_text()[-6000:] if log.exists() else ""
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-4000:] + server
