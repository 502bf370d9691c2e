"""Queries of a real Ray cluster through its internal functions."""

from __future__ import annotations

import subprocess
import sys

import pytest

ASKED = """
import time
import ray
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2
from ray.util.placement_group import placement_group, placement_group_table
from holdfast_service.cluster.occupied import occupied
from holdfast_service.cluster.ray_state import draining_nodes, free_cpus

small = {"object_store_memory": 80 << 20}
cluster = Cluster(
    initialize_head=True, head_node_args={**small, "num_cpus": 0, "include_dashboard": False}
)
first, second = (cluster.add_node(num_cpus=2, **small).node_id for _ in range(2))
ray.init(cluster.address, log_to_driver=False)

def places(group):
    return set(placement_group_table(group)["bundles_to_node_id"].values())

def wait(met):
    until = time.time() + 20
    while not met() and time.time() < until:
        time.sleep(0.05)
    assert met()

def all_free():
    return all(free_cpus().get(node) == 2.0 for node in (first, second))

for aside, left in ((first, second), (second, first)):
    wait(all_free)  # the GCS receives it a moment later
    with occupied([aside]) as some:
        assert some
        group = placement_group([{"CPU": 1}])
        assert group.wait(10)
    assert places(group) == {left}, "while it is placed"
    ray.util.remove_placement_group(group)
wait(all_free)
both = placement_group([{"CPU": 1}] * 2, strategy="STRICT_SPREAD")
assert both.wait(10) and places(both) == {first, second}, "afterwards all is free again"

assert draining_nodes() == {}
reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
deadline = time.time() + 600
accepted, why = GcsClient(address=cluster.address).drain_node(
    first, reason, "the spot market wants it back", int(deadline * 1000)
)
assert accepted, why
wait(draining_nodes)
((node, at),) = draining_nodes().items()
assert node == first and abs(at - deadline) < 0.01, (node, at)
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.cluster
def test_draining_nodes_are_listed_and_nodes_can_be_occupied_during_placement() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", ASKED], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
