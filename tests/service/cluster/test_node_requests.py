"""Labels and custom resources that a job asks for, on real Ray nodes."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import time
import ray
from pathlib import Path
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, remove_placement_group
from tests.support.service.unwatched import Unwatched
from holdfast_service.cluster import actor_names
from holdfast_service.cluster.ray_cluster import RayCluster
from holdfast_service.job_model.admission import Claim, NodeDemand, admit
from holdfast_service.job_model.job_spec import parse
from holdfast_service.job_model.node_labels import rules_of, selector_of

small = {"num_cpus": 2, "object_store_memory": 80 << 20}
head = {**small, "num_cpus": 0, "include_dashboard": False}
cluster = Cluster(initialize_head=True, head_node_args=head)
nodes = {
    cluster.add_node(labels={"disk": "nvme"}, resources={"fpga": 2}, **small).node_id: "nvme",
    cluster.add_node(labels={"disk": "hdd"}, num_gpus=2, resources={"accelerator_type:H100": 1},
                     **small).node_id: "hdd",
    cluster.add_node(**small).node_id: "none",
}
ray.init(cluster.address, log_to_driver=False)
ours = RayCluster("i" * 8, b"key", Path("/nowhere"), can_grow=False, connection=Unwatched())
capacity = ours._capacity()
by_name = {nodes.get(node.node_id, "head"): node for node in capacity.nodes}
assert by_name["nvme"].custom == {"fpga": 2.0}, by_name
assert by_name["hdd"].custom == {"accelerator_type:H100": 1.0}, by_name
assert by_name["none"].custom == by_name["head"].custom == {}, by_name
assert (by_name["nvme"].labels["disk"], by_name["hdd"].labels["disk"]) == ("nvme", "hdd")

def places(spec, name="probe", within_s=60.0):
    group = placement_group([spec.resources.bundle], name=name,
                            bundle_label_selector=[selector_of(spec.resources.label_rules)])
    if not group.wait(within_s):
        remove_placement_group(group)
        return None, group
    return nodes[ray.util.placement_group_table(group)["bundles_to_node_id"][0]], group

for resources, allowed in [
    ({"node_labels": {"disk": "nvme"}}, {"nvme"}),
    ({"node_labels": {"disk": "!nvme"}}, {"hdd", "none"}),
    ({"node_labels": {"disk": ["nvme", "ssd"]}}, {"nvme"}),
    ({"node_labels": {"disk": ["!nvme", "!hdd"]}}, {"none"}),
    ({"node_labels": {"disk": "ssd"}}, set()),
    ({"custom": {"fpga": 1.5}}, {"nvme"}),
    ({"custom": {"fpga": 1.5}, "node_labels": {"disk": "hdd"}}, set()),
    ({"gpus_per_worker": 1, "accelerator_type": "H100"}, {"hdd"}),
    ({"gpus_per_worker": 1, "accelerator_type": "A100"}, set()),
]:
    spec = parse({"name": "x", "resources": resources}, None)
    found = admit(capacity, {}, (), (), Claim("c", NodeDemand.from_spec(spec)))
    assert found.may_start == bool(allowed), (resources, found)
    place, group = places(spec, within_s=60.0 if allowed else 1.0)
    remove_placement_group(group)
    assert place in allowed if allowed else place is None, (resources, place)

def until_foreign(amount):
    deadline = time.monotonic() + 60
    while True:  # Ray's figures are late
        found = [node.foreign_custom["fpga"] for node in ours._capacity().nodes if node.custom
                 and "fpga" in node.custom]
        if found == [amount]:
            return
        assert time.monotonic() < deadline, found
        time.sleep(0.1)

spec = parse({"name": "x", "resources": {"custom": {"fpga": 1.5}}}, None)
_, foreign = places(spec)
until_foreign(1.5)
remove_placement_group(foreign)
_, own = places(spec, actor_names.placement_group("i" * 8, "job"))
until_foreign(0.0)
assert ours._capacity().placed.keys() == {"job"}
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.cluster
def test_admission_and_ray_agree_on_the_nodes_that_a_job_may_have() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=180, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
