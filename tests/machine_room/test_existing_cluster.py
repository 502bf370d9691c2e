"""A Ray cluster that others started: its nodes run the server's Holdfast, or are named and left
alone."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.support.machine_room import existing_cluster
from tests.support.machine_room.host import Host
from tests.support.machine_room.room import MachineRoom
from tests.support.machine_room.training_room import (
    COMMAND_S,
    HEAD,
    SERVICES,
    TrainingRoom,
    require_room,
)
from tests.support.waiting import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
STEPS = 20
SEND = "--send-own-code"
JOB_S = 120.0
CODE = Path(existing_cluster.__file__).with_name("users_folder")
BARE, OTHER = "a", "b"


@dataclass(frozen=True)
class ExistingCluster:
    """`covered`: the folders of Holdfast that host `a` does not see."""

    room: TrainingRoom
    covered: list[str]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExistingCluster]:
    """Host `a` has no Holdfast, host `b` another build of it; both have all that it needs."""
    require_room()
    with (
        MachineRoom([HEAD, BARE, OTHER, SERVICES], tmp_path_factory.mktemp("logs")) as hosts,
        ThreadPoolExecutor() as pool,
    ):
        made = TrainingRoom(hosts)
        storage = pool.submit(made.services.start_s3)
        existing_cluster.start_head(made)
        covered = existing_cluster.hide_holdfast(hosts[BARE])
        existing_cluster.install_another_build(hosts[OTHER])
        existing_cluster.start_nodes(made, BARE, OTHER)
        storage.result()
        yield ExistingCluster(made, covered)


def doctor(room: TrainingRoom) -> list[dict[str, Any]]:
    """What is wrong with the nodes."""
    command = f"holdfast doctor --cluster -o jsonl --address {room.client.address}"
    done = room.head.run(command, check=False, timeout_s=COMMAND_S)
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert results, done.stdout
    return [result for result in results if result["grade"] == "bad"]


def spec(room: TrainingRoom) -> dict[str, Any]:
    made = room.spec(STEPS)
    made["resources"]["standby_nodes"] = 0
    return made


def test_sent_code_trains_on_nodes_without_holdfast_and_with_another_build(
    cluster: ExistingCluster,
) -> None:
    room = cluster.room
    client = room.serve_any(SEND)
    job = client.submit(spec(room))
    assert doctor(room) == []
    ended = client.wait(job.id, JOB_S)
    assert ended.state == "SUCCEEDED", ended
    assert set(room.hosts_of(job.id).values()) == {BARE, OTHER}
    assert ended.build == client.version().build
    room.server.end()


@pytest.mark.soak
def test_sent_code_reaches_restarted_agents_and_the_processes_that_ranks_spawn(
    cluster: ExistingCluster,
) -> None:
    room = cluster.room
    client = room.serve_any(SEND)
    without_model = {key: value for key, value in spec(room).items() if key != "model"}
    function = {"function": "spawning:train", "code": str(CODE)}
    job = client.submit(
        {**without_model, **function, "train": {**spec(room)["train"], "steps": 200}}
    )
    eventually(lambda: (client.get(job.id).progress.step or 0) >= 2, JOB_S)
    room.server.end()
    kill_agent(room.room[BARE])
    client = room.serve_any(SEND)
    ended = client.wait(job.id, JOB_S)
    assert ended.state == "SUCCEEDED", ended
    assert len(client.attempts(job.id)) == 2
    assert ended.build == client.version().build
    said = [line.text for line in client.all_logs(job.id) if "spawned with" in line.text]
    assert len(said) >= 3, "ranks of both attempts"
    assert all(f"build {ended.build} from /tmp/ray" in line for line in said), said
    room.server.end()


def kill_agent(host: Host) -> None:
    titles = {pid: psutil.Process(pid).cmdline()[:1] for pid in host.pids()}
    (pid,) = [pid for pid, title in titles.items() if title == ["ray::StartedAgent"]]
    os.kill(pid, signal.SIGKILL)


@pytest.mark.soak
def test_without_sent_code_nodes_are_named_until_they_have_holdfast_and_the_bits_are_the_same(
    cluster: ExistingCluster,
) -> None:
    room = cluster.room
    client = room.serve_any(SEND)
    sent = client.submit(spec(room))
    assert client.wait(sent.id, JOB_S).state == "SUCCEEDED"
    room.server.end()

    client = room.serve_any("", HOLDFAST_PACE__NODE_ROOM_FRESH_S="20")
    found = {result["what"]: result for result in doctor(room)}
    bare, other = (f"{room.room.address(name)} holdfast" for name in (BARE, OTHER))
    assert set(found) == {bare, other}
    assert "Holdfast is not installed" in found[bare]["seen"]
    assert "--send-own-code" in found[bare]["advice"]
    job = client.submit(spec(room))

    def reason() -> str:
        now = client.get(job.id)
        return now.waiting.reason if now.state == "QUEUED" and now.waiting else ""

    eventually(lambda: f"{room.room.address(BARE)} (cannot be used" in reason(), JOB_S)
    existing_cluster.install(room.room[BARE], cluster.covered, room.room[OTHER])
    ended = client.wait(job.id, JOB_S)
    assert ended.state == "SUCCEEDED", ended
    assert set(room.hosts_of(job.id).values()) == {BARE, OTHER}
    assert client.digests(job.id) == client.digests(sent.id)
    room.server.end()
