"""`holdfast doctor --cluster` on several machines names each planted fault with its machine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.support.machine_room.host import HOME
from tests.support.machine_room.room import MIB, ROOT
from tests.support.machine_room.training_room import JOIN, SERVICES, TrainingRoom, training_room

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
COMMAND_S = 150.0
AHEAD_S = 20
FAKETIME = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
OTHER_CODE = f"{HOME}/other"
FAULTS = {
    "a": {"shm", "files"},
    "b": {"holdfast", "torch", "clock"},
    "c": {"network", "storage"},
    "d": {"gpu", "cache", "shm", "network"},
}
"""Machine -> the subjects of its faults. `c` and `d` cannot connect to each other."""


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingRoom]:
    sizes = {"a": 64 * MIB}
    with training_room(
        tmp_path_factory.mktemp("logs"), ["a", "b", "c", "d"], shm_bytes=sizes
    ) as it:
        it.up()
        plans = {
            "a": f"ulimit -n 1000; {JOIN}",
            "b": f"{_clock()} PYTHONPATH={OTHER_CODE}:$PYTHONPATH {JOIN}",
            "c": JOIN,
            "d": f"HOLDFAST_CACHE_DIR=/proc/none {JOIN} --gpus 1",
        }
        _install_other_versions(it)

        def join(name: str) -> None:
            it.copy_token(name)
            it.room[name].run(f"{plans[name]} --cpus 1", timeout_s=COMMAND_S)

        with ThreadPoolExecutor(len(plans)) as pool:
            list(pool.map(join, plans))
        it.serve(HOLDFAST_PACE__CLUSTER_CHECK_S="100")
        it.room["d"].run("chown 12345 /dev/shm/holdfast-*")
        for unreachable in ("d", SERVICES):
            it.room["c"].run(f"ip route add blackhole {it.room.address(unreachable)}/32")
        yield it


def _clock() -> str:
    assert FAKETIME is not None, "install the package faketime"
    on_workers = "RAY_LD_PRELOAD_ON_WORKERS"  # Ray takes it from them otherwise
    passed_on = f"HOLDFAST_WORKER_ENV=FAKETIME,{on_workers}"
    return f"LD_PRELOAD={FAKETIME} FAKETIME=+{AHEAD_S}s {on_workers}=1 {passed_on}"


def _install_other_versions(room: TrainingRoom) -> None:
    """On host b: another version of torch by name, and other code of Holdfast."""
    there = room.room["b"].outside(OTHER_CODE)
    name = "holdfast_workers"
    shutil.copytree(ROOT / "workers" / name, there / name)
    (there / name / "changed.py").write_text("")
    metadata = there / "torch-2.11.0.dist-info/METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.11.0\n")


def test_every_planted_fault_is_named_with_its_machine(room: TrainingRoom) -> None:
    command = f"holdfast doctor --cluster -o jsonl --address {room.client.address}"
    done = room.head.run(command, check=False, timeout_s=COMMAND_S)
    assert done.returncode == 8, done.stdout
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    names = {room.room.address(name): name for name in room.room.names}
    found: dict[str, set[str]] = {}
    for result in results:
        if result["grade"] == "bad":
            host, _, what = result["what"].partition(" ")
            found.setdefault(names[host], set()).add(what)
            assert result["advice"], result
    assert found == FAULTS, done.stdout
    assert f"{AHEAD_S}." in next(r["seen"] for r in results if r["what"].endswith("clock"))
    assert names[next(r["what"] for r in results if r["grade"] == "good")] == "head"
