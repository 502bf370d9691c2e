"""Nodes end as they were started: orderly or killed, in the background or for systemd; and a head
comes back from Redis."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.support.machine_room.host import HOME, Host
from tests.support.machine_room.room import MachineRoom
from tests.support.machine_room.services import PASSWORD, Services, has_redis
from tests.support.machine_room.training_room import (
    COMMAND_S,
    JOIN,
    TOKEN,
    TrainingRoom,
    require_room,
)
from tests.support.waiting import eventually

from holdfast_workers import build

pytestmark = [pytest.mark.cluster, pytest.mark.soak, pytest.mark.timeout(400)]
SEEN_S = 60.0


@pytest.fixture
def room(tmp_path: Path) -> Iterator[TrainingRoom]:
    require_room()
    with MachineRoom(["head", "a", "services"], tmp_path) as made:
        yield TrainingRoom(made)


def status(host: Host) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(host.run("holdfast cluster status --json").stdout)
    return found


def alive(host: Host) -> set[str]:
    return {node["name"] for node in status(host)["nodes"] if node["alive"]}


def left_on(host: Host) -> list[str]:
    """Processes, temporary folders and segments of a node."""
    folders = host.run("ls -d /tmp/holdfast-* /dev/shm/* 2>/dev/null", check=False).stdout
    return [*folders.split(), *map(str, host.pids())]


def kill(host: Host, program: str) -> None:
    (pid,) = [pid for pid in host.pids() if psutil.Process(pid).name() == program]
    os.kill(pid, signal.SIGKILL)


def test_the_printed_commands_are_the_right_ones(room: TrainingRoom) -> None:
    printed = room.head.run("holdfast cluster up --head --json --cpus 1", timeout_s=COMMAND_S)
    made = json.loads(printed.stdout)
    assert made["token_file"] == TOKEN
    a = room.room["a"]
    room.copy_token("a")
    joined = a.run(made["join"], timeout_s=COMMAND_S)
    assert alive(a) == {"head", "a"}
    assert {node["build"] for node in status(a)["nodes"]} == {build.LOADED}
    assert "warning" not in joined.stdout
    assert made["serve"] == (
        f"holdfast serve --ray-address {room.head.address}:6379 --ray-token-file {TOKEN} "
        "--store-uri s3://BUCKET/PREFIX"
    )

    # A node that leaves ends what it started, and says good-bye.
    foreign = a.start(["sleep", "600"], HOLDFAST_CLUSTER_ID="another")
    a.run("holdfast cluster leave")
    assert alive(room.head) == {"head"}
    assert foreign.status is None
    foreign.end()
    assert left_on(a) == []

    # What a killed node left is cleared by the next one.
    a.run(f"{JOIN} --cpus 1", timeout_s=COMMAND_S)
    kill(a, "raylet")
    eventually(lambda: a.run("holdfast cluster status", check=False).returncode == 8, SEEN_S)
    a.run(f"{JOIN} --cpus 1", timeout_s=COMMAND_S)
    assert len([path for path in left_on(a) if path.startswith("/tmp")]) == 1

    ended = room.head.run("holdfast cluster down").stdout
    assert "run `holdfast cluster leave` on each" in ended
    assert ": a;" in ended
    assert left_on(room.head) == []
    assert room.head.read(TOKEN) == a.read(f"{HOME}/token")
    a.run("holdfast cluster leave")
    assert left_on(a) == []


def test_a_node_in_the_foreground_ends_with_its_command(room: TrainingRoom) -> None:
    head = room.head
    blocked = head.start("exec holdfast cluster up --head --block --cpus 1")
    eventually(lambda: "is the head of" in blocked.output() or blocked.status, COMMAND_S)
    room.copy_token("a")
    a = room.room["a"]
    node = a.start(f"exec {JOIN} --block --cpus 1")
    eventually(lambda: "is a node of" in node.output() or node.status, COMMAND_S)
    kill(a, "raylet")
    assert node.wait(SEEN_S) == 8
    assert "Ray ended with status" in node.output()
    assert left_on(a) == []
    blocked.signal(signal.SIGTERM)
    assert blocked.wait(SEEN_S) == 0, blocked.output()
    assert left_on(head) == []
    assert "not part of a cluster" in head.run("holdfast cluster status", check=False).stdout


@pytest.mark.skipif(not has_redis(), reason="there is no redis-server, or no openssl")
def test_a_replaced_head_continues_the_cluster_of_its_redis(room: TrainingRoom) -> None:
    services = Services(room.room["services"])
    certificate = services.start_redis()

    def up(options: str = "") -> None:
        room.head.write(f"{HOME}/redis", PASSWORD)
        room.head.write(f"{HOME}/redis.crt", certificate)
        room.head.run(
            f"RAY_REDIS_CA_CERT={HOME}/redis.crt holdfast cluster up --head --no-training "
            f"--redis-address {services.redis} --redis-password-file redis {options}",
            timeout_s=COMMAND_S,
        )

    up()
    room.join("a")
    token = room.head.read(TOKEN)
    room.room.power_off("head")
    room.room.boot("head").write(f"{HOME}/token", token)
    up("--token-file token")
    eventually(lambda: alive(room.head) == {"head", "a"}, SEEN_S)
    assert status(room.room["a"])["running"]
