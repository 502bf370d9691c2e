"""The machine room itself: hosts share nothing that they can write, and leave nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from tests.support.machine_room.host import HOME, HostFault
from tests.support.machine_room.room import MachineRoom
from tests.support.machine_room.training_room import require_room
from tests.support.nodes.namespaces import Bridge
from tests.support.waiting import eventually

pytestmark = pytest.mark.cluster
MIB = 2**20
PING = "import socket, sys; socket.create_connection((sys.argv[1], 7000), 2).close()"


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MachineRoom]:
    require_room()
    logs = tmp_path_factory.mktemp("logs")
    with MachineRoom(["a", "b"], logs, shm_bytes={"b": 16 * MIB}) as made:
        yield made


@contextmanager
def listening(room: MachineRoom, name: str) -> Iterator[None]:
    program = "import socket; s = socket.create_server(('', 7000)); print('up', flush=True)"
    process = room[name].start(["python", "-c", f"{program}\nwhile True: s.accept()"])
    eventually(lambda: "up" in process.output())
    yield
    process.end()


def reaches(room: MachineRoom, there: str) -> bool:
    return room["a"].run(["python", "-c", PING, there], check=False).returncode == 0


def test_a_host_has_its_own_name_home_and_processes(room: MachineRoom) -> None:
    assert room["a"].run("hostname; pwd").stdout.split() == ["a", HOME]
    assert int(room["a"].run("echo $$").stdout) < 100
    assert f"inet {room['b'].address}/" in room["b"].run("ip addr").stdout


@pytest.mark.parametrize(
    "folder", ["/tmp", "/dev/shm", "/home", "/var/tmp", "/run", "/mnt", "/etc"]
)
def test_no_host_sees_what_another_writes(room: MachineRoom, folder: str) -> None:
    room["a"].run(f"echo mine > {folder}/file")
    assert room["a"].read(f"{folder}/file") == "mine\n"
    assert room["b"].run(f"cat {folder}/file", check=False).returncode != 0
    assert not Path(folder, "file").exists()


@pytest.mark.parametrize("folder", ["/", "/usr", str(Path(__file__).parent)])
def test_what_is_common_cannot_be_written(room: MachineRoom, folder: str) -> None:
    refused = room["a"].run(f"touch {folder}/file", check=False)
    assert "Read-only file system" in refused.stdout


def test_shared_memory_has_the_size_that_was_asked_for(room: MachineRoom) -> None:
    fill = "head -c 20M /dev/zero > /dev/shm/file"
    room["a"].run(fill)
    assert "No space left" in room["b"].run(fill, check=False).stdout


def test_a_cut_link_is_silent_and_can_be_restored(room: MachineRoom) -> None:
    with listening(room, "b"):
        assert reaches(room, "b")
        room.link("b", up=False)
        assert not reaches(room, "b")
        room.link("b", up=True)
        assert reaches(room, "b")


def test_a_host_without_power_loses_everything_and_boots_empty(room: MachineRoom) -> None:
    room["b"].run("echo mine > /tmp/file; setsid sleep 1000 > /dev/null &")
    eventually(room["b"].pids)
    pids = room["b"].pids()
    room.power_off("b")
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    assert not reaches(room, "b")
    assert room.boot("b").run("ls /tmp").stdout == ""
    with listening(room, "b"):
        assert reaches(room, "b")


def test_a_command_that_fails_or_hangs_is_an_error_with_its_output(room: MachineRoom) -> None:
    with pytest.raises(HostFault, match="ended with 3:\nwhy"):
        room["a"].run("echo why; exit 3")
    with pytest.raises(HostFault, match="still runs"):
        room["a"].run(["sleep", "1000"], timeout_s=0.3)
    assert room["a"].pids() == []


LEFT = """
import os, sys, time
from pathlib import Path
from tests.support.machine_room.room import MachineRoom
from tests.support.waiting import eventually
with MachineRoom(["a"], Path(sys.argv[1])) as room:
    room["a"].start("sleep 1000")
    eventually(room["a"].pids)
    print(os.getpid(), room["a"].init, *room["a"].pids(), flush=True)
    {then}
"""


@pytest.mark.parametrize("then", ["pass", "os.kill(os.getpid(), 9)"])
def test_a_room_leaves_no_process_even_if_its_test_is_killed(tmp_path: Path, then: str) -> None:
    require_room()
    command = [sys.executable, "-c", LEFT.format(then=then), str(tmp_path)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    maker, *pids = map(int, ended.stdout.split())
    assert len(pids) >= 2
    eventually(lambda: not any(map(psutil.pid_exists, pids)))
    if ended.returncode == 0:
        for command in (["ip", "link"], ["ip", "netns"]):
            found = subprocess.run(command, capture_output=True, text=True).stdout
            assert f"hf{maker % 100000}" not in found
    Bridge(["a"], maker).close()
