"""The embedded cluster: it outlives its starter, loses and gains nodes, and leaves nothing."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.support.waiting import eventually

from holdfast_service.embedded_cluster import local_cluster, processes
from holdfast_service.embedded_cluster.local_cluster import KeeperOptions, LocalCluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

STARTS_AND_DIES = """
import os, signal, sys
from pathlib import Path
from holdfast_service.embedded_cluster import local_cluster
local_cluster.ensure(Path(sys.argv[1]), local_cluster.KeeperOptions(2))
os.kill(os.getpid(), signal.SIGKILL)
"""

RECEIVES_SIGTERM_IN_A_CALLBACK = """
import signal, weakref
from holdfast_service.embedded_cluster.keeper import StopRequest
class Thing: pass
stop_request = StopRequest()
thing = Thing()
watched = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGTERM))
del thing
assert stop_request.requested
assert stop_request.wakeup.recv(1)
"""

LISTS_NODES = """
import json, ray, sys
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
print(json.dumps([n["NodeID"] for n in ray.nodes() if n["Alive"]]))
"""
SHOWS_GPUS = """
import json, os, ray, sys
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")

@ray.remote(num_gpus=1, num_cpus=0)
class Holder:
    def sees(self):
        node = os.environ["HOLDFAST_NODE_NAME"]
        return node, os.environ["CUDA_VISIBLE_DEVICES"]

count = int(ray.cluster_resources().get("GPU", 0))
holders = [Holder.remote() for _ in range(count)]
print(json.dumps(sorted(ray.get([holder.sees.remote() for holder in holders], timeout=60))))
"""
GONE_S = 60.0


def remains(cluster: LocalCluster) -> list[str]:
    found = [str(p) for p in (Path(cluster.temp_dir), Path(cluster.shm_root)) if p.exists()]
    found += [str(pid) for pid in processes.of_cluster(cluster.cluster_id)]
    if psutil.pid_exists(cluster.keeper_pid):
        status = psutil.Process(cluster.keeper_pid).status()
        found += ["keeper"] if status != psutil.STATUS_ZOMBIE else []
    return found


def alive_nodes(cluster: LocalCluster) -> str:
    return run_on(cluster, LISTS_NODES)


def run_on(cluster: LocalCluster, program: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", program, cluster.address],
        env={**os.environ, **cluster.environment()},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout


@pytest.fixture
def data_dir(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    local_cluster.stop(tmp_path)


def test_the_cluster_outlives_its_starter_loses_and_gains_a_node_and_leaves_nothing(
    data_dir: Path,
) -> None:
    shm_before = shared_memory()
    starter = subprocess.run([sys.executable, "-c", STARTS_AND_DIES, str(data_dir)], timeout=120)
    assert starter.returncode == -signal.SIGKILL
    cluster = local_cluster.find(data_dir)
    assert cluster is not None
    again = local_cluster.ensure(data_dir, KeeperOptions(2))
    assert again.cluster_id == cluster.cluster_id, "adopted"
    assert [node.name for node in cluster.nodes] == ["head", "node-0", "node-1"]
    own = (cluster.token_path, cluster.temp_dir, cluster.shm_root)
    assert not [path for path in own if Path(path).stat().st_mode & 0o077]
    assert cluster.ray_dir.parent == Path(cluster.temp_dir), "Ray opens its folder to all users"
    assert list(cluster.ray_dir.glob("session_*"))
    assert loopback_only(cluster)

    victim = cluster.nodes[1]
    killed = local_cluster.kill_node(cluster, victim.node_id)
    assert victim.raylet_pid in killed
    assert processes.of_node(cluster.cluster_id, victim.name, victim.raylet_pid) == []
    eventually(lambda: victim.node_id not in alive_nodes(cluster), GONE_S)

    added = local_cluster.add_node(cluster)
    listed = alive_nodes(cluster)
    assert added.node_id in listed and cluster.nodes[2].node_id in listed

    assert local_cluster.stop(data_dir)
    assert remains(cluster) == []
    assert shared_memory() <= shm_before
    assert local_cluster.find(data_dir) is None
    assert not local_cluster.stop(data_dir), "nothing left to stop"


def shared_memory() -> set[Path]:
    """The files in shared memory, except those of concurrent tests and databases."""
    foreign = ("holdfast-test-", "PostgreSQL.")
    return {path for path in Path("/dev/shm").iterdir() if not path.name.startswith(foreign)}


def loopback_only(cluster: LocalCluster) -> bool:
    listening = []
    for pid in processes.of_cluster(cluster.cluster_id):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
            listening += [
                connection.laddr.ip
                for connection in psutil.Process(pid).net_connections("inet")
                if connection.status == psutil.CONN_LISTEN
            ]
    return bool(listening) and all(ip.removeprefix("::ffff:") == "127.0.0.1" for ip in listening)


def test_nodes_divide_the_gpus_and_no_two_actors_share_one(data_dir: Path) -> None:
    """The devices are only named: no program here touches them."""
    cluster = local_cluster.ensure(data_dir, KeeperOptions(2, gpus=["GPU-a", "GPU-b", "GPU-c"]))
    assert json.loads(run_on(cluster, SHOWS_GPUS)) == [
        ["node-0", "GPU-a"],
        ["node-0", "GPU-b"],
        ["node-1", "GPU-c"],
    ]


def test_a_killed_keeper_ends_the_cluster_and_the_next_stop_sweeps(data_dir: Path) -> None:
    cluster = local_cluster.ensure(data_dir, KeeperOptions(1))
    os.kill(cluster.keeper_pid, signal.SIGKILL)
    eventually(lambda: local_cluster.find(data_dir) is None, GONE_S)
    (Path(cluster.shm_root) / "own-0.seg").write_bytes(b"left behind")
    assert local_cluster.stop(data_dir)
    assert remains(cluster) == []


def test_an_orphan_ends_itself_after_its_grace(data_dir: Path) -> None:
    with local_cluster.attached(data_dir):
        cluster = local_cluster.ensure(data_dir, KeeperOptions(1, orphan_grace_s=1.0))
        time.sleep(2.5)  # longer than the grace: it must not end while a server is attached
        assert local_cluster.find(data_dir) is not None
    eventually(lambda: remains(cluster) == [], GONE_S)


def test_a_stop_signal_inside_a_callback_is_not_lost() -> None:
    command = [sys.executable, "-c", RECEIVES_SIGTERM_IN_A_CALLBACK]
    subprocess.run(command, timeout=60, check=True)
