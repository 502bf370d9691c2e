"""A Ray cluster with an autoscaler, whose nodes are processes of Ray's fake provider.

The provider has one fixed set of node ids, so the cluster needs a PID namespace of its own: what it
leaves behind ends with the namespace. The configuration is written here, as Ray's wheel has none.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
from tests.support.service.ray_processes import free_port
from tests.support.waiting import eventually

from holdfast_service.embedded_cluster.ray_settings import CLUSTER_SETTINGS

START_S = 60.0
STORE_BYTES = 80 * 2**20
PROVIDER = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"
HEAD_ID = "f" * 51 + "00000"
HEAD_TYPE = "ray.head.default"
LISTS = (
    *("initialization_commands", "setup_commands", "head_setup_commands"),
    *("worker_setup_commands", "head_start_ray_commands", "worker_start_ray_commands"),
    *("cluster_synced_files", "rsync_exclude", "rsync_filter"),
)


def configuration(
    address: str, kinds: dict[str, dict[str, float]], idle_s: float
) -> dict[str, Any]:
    """`kinds`: the resources of each kind of node that may be added."""
    types = {
        kind: {
            "resources": {**resources, "object_store_memory": STORE_BYTES},
            "node_config": {},
            "min_workers": 0,
            "max_workers": 3,
        }
        for kind, resources in kinds.items()
    }
    head = {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0}
    return {
        "cluster_name": "fake",
        "max_workers": 4,
        "idle_timeout_minutes": idle_s / 60.0,
        "upscaling_speed": 1.0,
        "provider": {
            "type": "external",  # else Ray reads an example file that its wheel lacks
            "module": PROVIDER,
            "launch_multiple": True,
            "use_node_id_as_ip": True,  # all nodes have one address
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
            "head_node_id": HEAD_ID,
            "gcs_address": address,
        },
        "available_node_types": {HEAD_TYPE: head, **types},
        "head_node_type": HEAD_TYPE,
        "auth": {},
        "docker": {},
        "file_mounts": {},
        "file_mounts_sync_continuously": False,
        **{name: [] for name in LISTS},
    }


@contextlib.contextmanager
def autoscaled_cluster(kinds: dict[str, dict[str, float]], idle_s: float) -> Iterator[str]:
    """Yields its address. The head has no CPUs, and nodes come only when they are asked for."""
    port = free_port()
    address = f"{ray.util.get_node_ip_address()}:{port}"
    folder = Path(tempfile.mkdtemp(prefix="holdfast-auto-", dir="/tmp"))  # sockets' names
    config = folder / "autoscaling.yaml"
    config.write_text(json.dumps(configuration(address, kinds, idle_s)))
    environ = {
        **os.environ,
        **CLUSTER_SETTINGS,
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_FAKE_CLUSTER": "1",
        "RAY_enable_autoscaler_v2": "1",
        "RAY_CLOUD_INSTANCE_ID": HEAD_ID,
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID,
        "RAY_TMPDIR": str(folder),
    }
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
        *("--port", str(port), "--autoscaling-config", str(config), "--num-cpus", "0"),
        *("--object-store-memory", str(STORE_BYTES), "--include-dashboard=false"),
        *("--min-worker-port", "0", "--max-worker-port", "0"),
        *("--dashboard-agent-listen-port", "0", "--disable-usage-stats"),
    ]
    log = folder / "head.log"
    try:
        with log.open("wb") as output:
            head = subprocess.Popen(command, env=environ, stdout=output, stderr=output)
        eventually(lambda: "Ray runtime started." in log.read_text(), START_S, "no head")
        yield address
        head.terminate()
        head.wait(START_S)
    except BaseException:
        for each in (log, *folder.glob("**/monitor.log"), *folder.glob("**/monitor.out")):
            print(f"--- {each}", each.read_text()[-4000:], sep="\n")
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
