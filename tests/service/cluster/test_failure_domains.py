"""Failure domains come from the labels of Ray's nodes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from holdfast_service.cluster.agent_actor import domain_of

LABELLED = """
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from holdfast_service.cluster.agent_actor import domain_of

small = {"num_cpus": 1, "object_store_memory": 80 << 20}
cluster = Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})
nodes = [
    cluster.head_node,
    cluster.add_node(labels={"holdfast.io/domain": "rack-1"}, **small),
    cluster.add_node(labels={"topology.kubernetes.io/zone": "zone-b"}, **small),
]
ray.init(cluster.address, log_to_driver=False)

@ray.remote(num_cpus=1)
class Agent:
    def domain(self):
        return domain_of(ray.get_runtime_context().get_node_labels())

found = []
for node in nodes:
    there = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
    agent = Agent.options(scheduling_strategy=there).remote()
    found.append(ray.get(agent.domain.remote(), timeout=60))
    ray.kill(agent)
print(found)
ray.shutdown()
cluster.shutdown()
assert found == ["", "rack-1", "zone-b"], found
"""


def test_holdfasts_own_label_comes_before_the_zone_and_none_means_unknown() -> None:
    zone = {"topology.kubernetes.io/zone": "z"}
    assert domain_of({}) == ""
    assert domain_of(zone) == "z"
    assert domain_of({**zone, "holdfast.io/domain": "rack"}) == "rack"
    assert domain_of({**zone, "holdfast.io/domain": ""}) == "z"
    assert domain_of({**zone, "rack": "7"}, "rack") == "7"
    assert domain_of(zone, "rack") == "", "the job named another label"


@pytest.mark.slow
def test_an_agent_reads_the_label_of_its_own_node() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", LABELLED], capture_output=True, text=True, timeout=180, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
