"""Queries of a real Ray cluster through its internal functions."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

ASKED = """
import os
import signal
import time
from unittest.mock import patch
import ray
from ray._raylet import GcsClient, PlacementGroupID
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from holdfast_service.cluster.agents import RayAgents
from holdfast_service.cluster.occupied import NODE_ID_LABEL, occupied
from holdfast_service.cluster.ray_state import draining_nodes, free_cpus, is_latest_process_of_actor
from holdfast_service.job_model.job_spec import parse
from holdfast_service.job_model.supervisor_protocol import JobPlan
from holdfast_service.policy.quarantine import Avoided, NodeStanding, node_name
from holdfast_workers.protocol.processes import StorageOptions

small = {"object_store_memory": 80 << 20}
cluster = Cluster(
    initialize_head=True, head_node_args={**small, "num_cpus": 0, "include_dashboard": False}
)
first, second = (cluster.add_node(num_cpus=2, **small).node_id for _ in range(2))
ray.init(cluster.address, log_to_driver=False)

def places(group):
    return set(placement_group_table(group)["bundles_to_node_id"].values())

def wait(met):
    until = time.monotonic() + 60
    while not met() and time.monotonic() < until:
        time.sleep(0.05)
    assert met()

def all_free():
    return all(free_cpus().get(node) == 2.0 for node in (first, second))

for aside, left in ((first, second), (second, first)):
    wait(all_free)  # the GCS receives it a moment later
    with occupied([aside], "i") as some:
        assert some
        group = placement_group([{"CPU": 1}])
        assert group.wait(60)
    assert places(group) == {left}, "while it is placed"
    ray.util.remove_placement_group(group)
wait(all_free)
both = placement_group([{"CPU": 1}] * 2, strategy="STRICT_SPREAD")
assert both.wait(60) and places(both) == {first, second}, "afterwards all is free again"

ray.util.remove_placement_group(both)
wait(all_free)
less_free = placement_group([{"CPU": 1}], bundle_label_selector=[{NODE_ID_LABEL: first}])
assert less_free.wait(60)
name = next(node_name(first, n["NodeManagerAddress"]) for n in ray.nodes() if n["NodeID"] == first)

def agents_of(job, spec, reserved, **plan):
    plan = JobPlan(job, spec, reserved=(reserved,), installation="i", **plan)
    return RayAgents(plan, b"", StorageOptions())

one = parse({"name": "x", "resources": {"cpus_per_worker": 1}}, None)
avoid = {name: Avoided(NodeStanding.QUARANTINED, "of late")}
agents = agents_of("job", one, second, avoid=avoid)
assert places(agents._placement_group()) == {first}, "rather in quarantine than on a reserved node"

def late_again():
    return agents_of("late", one, second)

assert not late_again().ensure(), "its nodes were taken, and it takes none that is reserved"
time.sleep(1)
groups = {g["name"]: g["state"] for g in ray.util.placement_group_table().values()}
assert groups["nodes:i:late"] == "REMOVED", "it asks for none meanwhile"
ray.util.remove_placement_group(less_free)
wait(lambda: free_cpus().get(first) == 1.0)
assert places(late_again()._placement_group()) == {first}

elastic = {"cpus_per_worker": 1, "workers_per_node": 1, "nodes": {"min": 1, "max": 2}}
bent = parse(
    {"name": "x", "parallel": {"dp_shard": "auto"}, "resources": {**elastic, "standby_nodes": 0}},
    None,
)
waits = agents_of("bent", bent, second)
assert not waits.ensure(), "one node is taken, and one is reserved"
time.sleep(1)
bent_groups = [g for g in placement_group_table().values() if g["name"].startswith("nodes:i:bent:")]
assert bent_groups and {g["state"] for g in bent_groups} <= {"PENDING", "REMOVED"}
waits.close()
starts = agents_of("bent", bent, first)
assert starts.ensure()
starts.close()
bent_groups = [g for g in placement_group_table().values() if g["name"].startswith("nodes:i:bent:")]
placed_on = [g["bundles_to_node_id"][0] for g in bent_groups if g["state"] == "CREATED"]
assert placed_on == [second], bent_groups
for group_id, group in placement_group_table().items():
    if group["name"].startswith("nodes:i:bent:"):
        ray.util.remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(group_id))))

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

@ray.remote(max_restarts=1, max_task_retries=-1, num_cpus=0)
class Actor:
    def pid(self):
        return os.getpid()

    def is_latest(self):
        return is_latest_process_of_actor()

    def would_be_latest(self):
        with patch("os.getpid", return_value=1):  # as the process before this one
            return is_latest_process_of_actor()

actor = Actor.remote()
pid = ray.get(actor.pid.remote())
os.kill(pid, signal.SIGKILL)
assert ray.get(actor.pid.remote(), timeout=60) != pid
wait(lambda: ray.get(actor.is_latest.remote()) is True)
assert ray.get(actor.would_be_latest.remote()) is False
ray.shutdown()
cluster.shutdown()
"""


ENDED = """
import os, signal, time
import ray
from ray.cluster_utils import Cluster
from holdfast_service.cluster.ray_state import has_ended, runs
from holdfast_workers.protocol.process_identity import ProcessIdentity

small = {"object_store_memory": 80 << 20}
cluster = Cluster(
    initialize_head=True, head_node_args={**small, "num_cpus": 0, "include_dashboard": False}
)
node = cluster.add_node(num_cpus=1, **small)
ray.init(cluster.address, log_to_driver=False)

@ray.remote(max_restarts=-1, num_cpus=1)
class Agent:
    def process(self):
        return ProcessIdentity("", os.getpid(), 0, ray.get_runtime_context().get_node_id())

def wait(met):
    until = time.monotonic() + 60
    while not met() and time.monotonic() < until:
        time.sleep(0.01)
    assert met()

agent = Agent.remote()
first = ray.get(agent.process.remote())
assert runs(agent, first) and not has_ended(agent, first)
os.kill(first.pid, signal.SIGSTOP)
ray.kill(agent, no_restart=False)
time.sleep(0.2)
assert not has_ended(agent, first), "it was told to end, and has not ended"
os.kill(first.pid, signal.SIGKILL)
wait(lambda: has_ended(agent, first))
wait(lambda: not runs(agent, first))
second = None
while second is None:
    try:
        second = ray.get(agent.process.remote(), timeout=60)
    except ray.exceptions.ActorUnavailableError:
        time.sleep(0.05)
assert runs(agent, second) and not has_ended(agent, second)
assert has_ended(agent, first), "it was replaced on a node that lives"

cluster.remove_node(node, allow_graceful=False)
wait(lambda: not runs(agent, second))
assert not has_ended(agent, second), "the end of a node proves nothing about its processes"
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.cell("P1", "GCS")
@pytest.mark.cluster
def test_only_a_living_nodes_raylet_proves_the_end_of_a_process() -> None:
    checks = {
        "RAY_health_check_period_ms": "200",
        "RAY_health_check_timeout_ms": "500",
        "RAY_health_check_failure_threshold": "2",
        "RAY_health_check_initial_delay_ms": "0",
    }
    ran = subprocess.run(
        [sys.executable, "-c", ENDED],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **checks},
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.cluster
def test_draining_nodes_are_listed_and_nodes_can_be_occupied_during_placement() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", ASKED], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
