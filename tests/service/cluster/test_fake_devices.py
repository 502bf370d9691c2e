"""Jobs with devices on a node that has none: Ray counts fake ones, and workers compute on CPUs."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

NAMES = "GPU-8932f937-d72c,MIG-GPU-8932f937-d72c/1/0,7,GPU-a1b2"
PROGRAM = """
import os
import re
import sys
import time
from pathlib import Path
import ray
from ray.cluster_utils import Cluster
from tests.support.service.unwatched import Unwatched
from holdfast_service.cluster.ray_cluster import RayCluster
from holdfast_service.job_model.admission import Claim, NodeDemand, admit
from holdfast_service.job_model.job_spec import parse
from holdfast_service.job_model.supervisor_protocol import Cursors, JobPlan, SupervisorReport
from holdfast_workers.protocol import codec

folder = Path(sys.argv[1])
names = os.environ.pop("CUDA_VISIBLE_DEVICES")
small = {"num_cpus": 4, "object_store_memory": 80 << 20}
cluster = Cluster(initialize_head=True,
                  head_node_args={**small, "num_cpus": 1, "include_dashboard": False})
os.environ["CUDA_VISIBLE_DEVICES"] = names
cluster.add_node(num_gpus=4, **small)
os.environ["CUDA_VISIBLE_DEVICES"] = ""
ray.init(cluster.address, log_to_driver=False)
ours = RayCluster("i" * 8, b"key", folder, can_grow=False, connection=Unwatched())
spec = parse({
    "name": "fake", "function": "tests.support.ranks.functions:shows_environment",
    "train": {"steps": 100000, "global_batch": 8, "micro_batch": 4},
    "parallel": {"dp_shard": 2},
    "resources": {"workers_per_node": 2, "gpus_per_worker": 1, "cpus_per_worker": 0.5,
                  "threads_per_worker": 2},
    "checkpoint": {"memory": {"every_steps": 0}, "remote": {"every_steps": 0}},
}, ours._capacity())
demand = NodeDemand.from_spec(spec)
assert admit(ours._capacity(), {}, (), (), Claim("c", demand)).may_start
jobs = ("a", "b")
for job in jobs:
    (folder / "jobs" / job).mkdir(parents=True)
    ours._ensure_supervisor(JobPlan(job, spec, str(folder / "jobs" / job / "checkpoints")))

shown = {job: {} for job in jobs}
threads = set()
deadline = time.monotonic() + 120
while any(len(ranks) < 2 for ranks in shown.values()):
    for job in jobs:
        answer = ray.get(ours._supervisor(job).poll.remote(codec.encode(Cursors())), timeout=60)
        for line in codec.decode(answer, SupervisorReport).logs:
            found = re.match("variable CUDA_VISIBLE_DEVICES=(.*)", line.text)
            if found:
                shown[job][line.rank] = found[1]
            threads |= {*re.findall("variable OMP_NUM_THREADS=(.*)|torch computes with (.*)",
                                    line.text)}
    assert time.monotonic() < deadline, shown
    time.sleep(0.2)
devices = [device for ranks in shown.values() for device in ranks.values()]
assert sorted(devices) == sorted(names.split(",")), shown
assert threads == {("2", ""), ("", "2 threads")}, threads
placed = ours._capacity()
held = [Claim(job, demand) for job in placed.placed]
assert "0 of 2 nodes have them" in admit(placed, {}, held, (), Claim("c", demand)).why
for job in jobs:
    while not ours._release(job):
        time.sleep(0.1)
print("done", shown)
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.cluster
def test_two_jobs_never_share_a_device_and_its_name_reaches_the_rank_unchanged(
    tmp_path: Path,
) -> None:
    with tempfile.TemporaryDirectory(prefix="holdfast-test-", dir="/dev/shm") as shm:
        ran = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(tmp_path)],
            env={
                **os.environ,
                "CUDA_VISIBLE_DEVICES": NAMES,
                "HOLDFAST_WORKER_DEVICE": "cpu",
                "HOLDFAST_SHM_ROOT": shm,
                "PYTHONPATH": os.pathsep.join([*filter(None, sys.path)]),
            },
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
    assert ran.returncode == 0, ran.stdout + ran.stderr
