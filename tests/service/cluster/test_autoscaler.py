"""A server on a Ray cluster with a real autoscaler: nodes come for a queued job, and go."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, os, signal, subprocess, sys
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
LARGE = {**JOB, "name": "large", "parallel": {"dp_shard": 4},
         "train": {**JOB["train"], "global_batch": 8}}
HUGE = {**JOB, "name": "huge", "resources": {"workers_per_node": 1, "cpus_per_worker": 64}}
KINDS = {"worker": {"CPU": 1}, "other": {"CPU": 0, "other": 1}}

with autoscaled_cluster(KINDS, idle_s=12.0) as address:
    command = [sys.executable, "-m", "holdfast", "serve", "--json", "--port", "0",
               "--data-dir", str(folder / "server"), "--ray-address", address, "--store-uri",
               str(folder / "store"), "--autoscale", "--autoscale-nodes", "2"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE,
                              stderr=(folder / "server.log").open("wb"),
                              env={**os.environ, "HOLDFAST_NODE_LOOK_S": "1"})
    ray.init(address, log_to_driver=False)
    request_resources(bundles=[{"other": 1}])  # of another program
    line = server.stdout.readline()
    assert line, (folder / "server.log").read_text()

    def nodes(resource):
        return sum(node["Resources"].get(resource, 0) > 0 for node in ray.nodes() if node["Alive"])

    def asked():
        groups = ray.util.placement_group_table().values()
        return [group["name"] for group in groups
                if group["name"].startswith("wanted:") and group["state"] != "REMOVED"]

    def others():
        state = get_cluster_resource_state(ray._private.worker.global_worker.gcs_client)
        return [dict(each.request.resources_bundle) for constraint
                in state.cluster_resource_constraints for each in constraint.resource_requests]

    with Client(json.loads(line)["address"]) as client:
        def waiting(job):
            return client.get(job.id).waiting

        job = client.submit(JOB)
        eventually(lambda: waiting(job) and waiting(job).asked, 15, lambda: waiting(job))
        assert "it was asked for 1 more nodes with 1 CPUs" in waiting(job).reason, waiting(job)
        large = client.submit(LARGE)
        bound = "it would have 5 nodes, and HOLDFAST_AUTOSCALE_NODES allows 2"
        eventually(lambda: waiting(large) and bound in waiting(large).reason, 15)
        client.cancel(large.id)
        ended = client.wait(job.id, 60)
        assert ended.state == "SUCCEEDED", client.verdict(job.id)
        assert nodes("CPU") == 1
        huge = client.submit(HUGE)
        eventually(asked, 15, "no request")
        client.cancel(huge.id)
        eventually(lambda: not asked(), 15, "the request is left")
        eventually(lambda: not nodes("CPU"), 60, "the node has not gone")
        huge = client.submit({**HUGE, "name": "again"})
        eventually(asked, 15, "no request")
        server.send_signal(signal.SIGKILL)
        server.wait()
        eventually(lambda: not asked(), 20, "the request outlives the server")
    assert nodes("other") == 1 and others() == [{"other": 1.0}], (ray.nodes(), others())
    ray.shutdown()
"""


@pytest.mark.cluster
@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None,
    reason="only root may make PID namespaces, with `unshare`",
)
@pytest.mark.timeout(240)
def test_nodes_come_for_a_queued_job_and_go_and_other_requests_stay(tmp_path: Path) -> None:
    apart = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    ran = subprocess.run(
        [*apart, sys.executable, "-c", PROGRAM, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "RAY_AUTH_MODE": "disabled"},
    )
    log = tmp_path / "server.log"
    server = log.read_text()[-6000:] if log.exists() else ""
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-4000:] + server
