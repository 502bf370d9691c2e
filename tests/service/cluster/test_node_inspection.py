"""The check of a cluster ends with the connection to Ray."""

from __future__ import annotations

import subprocess
import sys

import pytest

CUT_SHORT = """
import threading, time
import ray
from holdfast_service.cluster import node_inspection
from holdfast_service.cluster.runtime_env import OwnCode
from holdfast_service.job_model.supervisor_protocol import ClusterUnavailable

class Silent(node_inspection.NodeProbe):
    def facts(self):
        time.sleep(600)

ray.init(num_cpus=1, include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False)
lost = threading.Event()
(node,) = node_inspection.inspect_nodes(None, 60, OwnCode(), lost.is_set)
assert node.problem == ""
node_inspection.NodeProbe = Silent
(node,) = node_inspection.inspect_nodes(None, 2, OwnCode(), lost.is_set)
assert "did not answer within" in node.problem
threading.Timer(1.0, lost.set).start()
try:
    node_inspection.inspect_nodes(None, 3600, OwnCode(), lost.is_set)
except ClusterUnavailable as error:
    assert "the connection to Ray was lost" in str(error)
else:
    raise AssertionError("the check went on")
ray.shutdown()
"""


@pytest.mark.cluster
def test_a_check_ends_as_soon_as_the_connection_is_lost() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", CUT_SHORT], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
