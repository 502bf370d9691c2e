"""Machines as containers: a head with its state in Redis, a server that brings its own node and
reads mounted secrets, and nodes that train. The commands are those of `deploy/kuberay`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.machine_room.host import HOME
from tests.support.machine_room.room import ROOT
from tests.support.machine_room.services import PASSWORD, has_redis
from tests.support.machine_room.training_room import (
    COMMAND_S,
    PORT,
    READY_S,
    STORE,
    TrainingRoom,
    training_room,
)
from tests.support.waiting import eventually

from holdfast import Client

pytestmark = [pytest.mark.cluster, pytest.mark.soak, pytest.mark.timeout(400)]
MOUNTED = f"{HOME}/mounted"
JOB_S = 120.0


@pytest.fixture
def room(tmp_path: Path) -> Iterator[TrainingRoom]:
    with training_room(tmp_path, ["server", "a", "b"]) as made:
        yield made


def mount(room: TrainingRoom, host: str, files: dict[str, str]) -> None:
    """The files in a folder as Kubernetes mounts secrets: read-only, readable by their group."""
    there = room.room[host]
    for name, text in files.items():
        there.write(f"{HOME}/unmounted/{name}", text)
    there.run(
        f"mkdir {MOUNTED} && mount -t tmpfs tmpfs {MOUNTED} && cp -r unmounted/. {MOUNTED} && "
        f"find {MOUNTED} -type f -exec chmod 0440 {{}} + && mount -o remount,ro {MOUNTED} && "
        "rm -r unmounted"
    )


@pytest.mark.skipif(not has_redis(), reason="there is no redis-server, or no openssl")
def test_a_job_runs_on_containers_whose_secrets_are_mounted(room: TrainingRoom) -> None:
    token = "0123456789abcdef" * 4
    certificate = room.services.start_redis()
    mount(room, "head", {"token": token, "redis/password": PASSWORD, "redis/ca.crt": certificate})
    head = room.head.start(
        f"exec holdfast cluster up --head --block --no-training --token-file {MOUNTED}/token "
        f"--agent-ports 20000-20999 --redis-address {room.services.redis} "
        f"--redis-password-file {MOUNTED}/redis/password",
        RAY_REDIS_CA_CERT=f"{MOUNTED}/redis/ca.crt",
    )
    eventually(lambda: "is the head of" in head.output() or head.status, COMMAND_S)
    assert head.status is None, head.output()

    secrets = {
        "token": token,
        "keys/job-secrets.key": "k" * 32,
        "keys/secrets/bucket.json": json.dumps(room.services.secret()),
        "settings/HOLDFAST_DATABASE_URL": f"{room.services.database_url}\n",
    }
    mount(room, "server", secrets)
    machine = room.room["server"]
    server = machine.start(
        f"exec {ROOT}/deploy/image/holdfast-server --host {machine.address} "
        "--expose-without-authentication --json",
        HOLDFAST_RAY_ADDRESS="head:6379",
        HOLDFAST_RAY_TOKEN_FILE=f"{MOUNTED}/token",
        HOLDFAST_KEYS_DIR=f"{MOUNTED}/keys",
        HOLDFAST_SETTINGS_DIR=f"{MOUNTED}/settings",
        HOLDFAST_STORE_URI=STORE,
        HOLDFAST_STORE_ENDPOINT=room.services.endpoint,
        HOLDFAST_STORE_SECRET="bucket",
        HOLDFAST_ALLOWED_HOST=f"http://{machine.address}:{PORT}",
    )
    eventually(lambda: '"address"' in server.output() or server.status, COMMAND_S + READY_S)
    assert server.status is None, server.output()
    with Client(f"http://{machine.address}:{PORT}", retry_s=60) as client:
        client.ready()
        for name in ("a", "b"):
            mount(room, name, {"token": token})
            room.room[name].start(
                f"exec holdfast cluster join head:6379 --block --agent-ports=20000-20999 "
                f"--token-file={MOUNTED}/token --cpus=1 --label=holdfast.io/domain={name}"
            )
        eventually(lambda: sum(each.cpus for each in client.nodes()) == 2, COMMAND_S)
        resources = {"cpus_per_worker": 1, "workers_per_node": 1}
        job = client.jobs.submit(room.spec(steps=60, resources=resources))
        assert job.wait(timeout_s=JOB_S).state == "SUCCEEDED"
        members = client.attempts(job.id)[-1].members
        assert {member.host for member in members} == {room.room.address(name) for name in "ab"}
    assert any("step-" in key for key in room.services.objects())
