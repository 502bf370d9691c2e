"""A Ray cluster in a machine room that `ray start` made, on hosts with and without Holdfast."""

from __future__ import annotations

import shlex
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor

from tests.support.machine_room.host import HOME, Host
from tests.support.machine_room.room import ROOT
from tests.support.machine_room.training_room import COMMAND_S, TrainingRoom

from holdfast_service.embedded_cluster.ray_settings import CLUSTER_SETTINGS

GCS_PORT = 6379
OTHER_CODE = f"{HOME}/other"
_FIND = (
    "import importlib.util, sys\n"
    "found = importlib.util.find_spec(sys.argv[1])\n"
    "print(next(iter(found.submodule_search_locations)) if found else '')\n"
)


def start_head(room: TrainingRoom, cpus: int = 0) -> None:
    port = str(GCS_PORT)
    _ray_start(room.head, ["--head", "--port", port, "--include-dashboard=false"], cpus)


def start_nodes(room: TrainingRoom, *names: str, cpus: int = 1) -> None:
    """Several hosts at the same time."""
    address = f"{room.head.address}:{GCS_PORT}"
    with ThreadPoolExecutor(len(names)) as pool:
        list(
            pool.map(lambda name: _ray_start(room.room[name], ["--address", address], cpus), names)
        )


def hide_holdfast(host: Host) -> list[str]:
    """Cover the folders in which this host's Python finds Holdfast, and nothing else; returns
    them."""
    covered = []
    for package in ("holdfast_service", "holdfast_workers"):
        while folder := host.run(["python", "-c", _FIND, package]).stdout.strip():
            covered.append(folder.rpartition("/")[0])
            host.run(["mount", "-t", "tmpfs", "-o", "size=1m", "hidden", covered[-1]])
    return covered


def install_another_build(host: Host) -> None:
    """Other code of Holdfast's workers, found before the common one by nodes started there."""
    there, name = host.outside(OTHER_CODE), "holdfast_workers"
    shutil.copytree(ROOT / "workers" / name, there / name)
    (there / name / "changed.py").write_text("")


def install(bare: Host, covered: list[str], other: Host) -> None:
    """Both hosts have the common Holdfast from now on."""
    for folder in covered:
        bare.run(["umount", folder])
    shutil.rmtree(other.outside(OTHER_CODE))


def _ray_start(host: Host, arguments: list[str], cpus: int) -> None:
    settings = " ".join(f"{name}={value}" for name, value in CLUSTER_SETTINGS.items())
    words = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", *arguments),
        *("--node-ip-address", host.address, "--num-cpus", str(cpus), "--num-gpus", "0"),
        *("--object-store-memory", str(80 * 2**20), "--disable-usage-stats"),
    ]
    path = f"PYTHONPATH={OTHER_CODE}:$PYTHONPATH"
    host.run(f"{path} {settings} {shlex.join(words)}", timeout_s=COMMAND_S)
