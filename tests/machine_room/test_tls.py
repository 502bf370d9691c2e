"""Several machines with TLS between them: made by `holdfast cluster up --tls`, renewed while a job
runs, and in use when a host is lost."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import pytest
from tests.support.machine_room.host import HOME
from tests.support.machine_room.training_room import (
    CERTIFICATES,
    COMMAND_S,
    JOIN,
    TrainingRoom,
    training_room,
)
from tests.support.memory.certificates import addressed, new_authority
from tests.support.waiting import eventually

from holdfast_service.host_cluster.certificates import pem_of
from holdfast_workers.memory import wire

pytestmark = [pytest.mark.cluster, pytest.mark.soak, pytest.mark.timeout(400)]
NODES = ["a", "b", "c"]
STEPS = 120
JOB_S = 120.0
RECOVERY_S = 60.0
AGENT_PORTS = range(20000, 20010)
MACHINE = f"--cpus 1 --agent-ports {AGENT_PORTS[0]}-{AGENT_PORTS[-1]}"


def refusal(room: TrainingRoom, name: str, command: str) -> str:
    refused = room.room[name].run(command, check=False)
    assert refused.returncode == 8, refused.stdout
    return " ".join(refused.stdout.split())


def openings(room: TrainingRoom, name: str) -> set[bytes]:
    """The first bytes of the data servers on a host."""
    found = set()
    for port in AGENT_PORTS:
        with (
            contextlib.suppress(OSError),
            socket.create_connection((room.room.address(name), port), 1.0) as sock,
        ):
            sock.settimeout(0.5)
            found.add(sock.recv(wire.OPENING_BYTES))
    return found


def seconds_to_recover(room: TrainingRoom, *, renewed: bool = False) -> float:
    """A job on two of three hosts loses one, if asked after all have got a new certificate."""
    client = room.serve()
    job = client.submit(room.spec(STEPS))
    eventually(lambda: (client.get(job.id).progress.step or 0) >= 5, JOB_S)
    hosts = room.hosts_of(job.id)
    if renewed:
        assert wire.TLS_OPENING in openings(room, hosts[0])
        assert wire.GREETING not in openings(room, hosts[0])
        room.head.run("holdfast cluster certificate --days 30")
        for name in NODES:
            room.copy_certificates(name)
    room.room.power_off(hosts[1])
    ended = client.wait(job.id, JOB_S)
    assert ended.state == "SUCCEEDED", ended
    assert hosts[1] not in room.hosts_of(job.id).values()
    (incident,) = client.incidents(job.id)
    print("recovery, in seconds:", incident.phases_s)
    return incident.phases_s["total"] or RECOVERY_S


def test_a_host_is_lost_after_the_certificate_was_renewed(tmp_path: Path) -> None:
    with training_room(tmp_path, NODES) as room:
        up = "holdfast cluster up --head --no-training --tls"
        printed = room.head.run(up, timeout_s=COMMAND_S).stdout
        assert f"and the folder {CERTIFICATES} to the other machines" in " ".join(printed.split())
        room.copy_token("a")
        assert "uses TLS between nodes: copy its folder of certificates" in refusal(room, "a", JOIN)
        assert "it needs the files ca.crt" in refusal(room, "a", f"{JOIN} --tls-dir {HOME}")
        for name in NODES:
            room.copy_certificates(name)
        assert "the machine that made them" in refusal(room, "a", "holdfast cluster certificate")
        room.join(*NODES, options=f"{MACHINE} --tls-dir tls")
        assert seconds_to_recover(room, renewed=True) < RECOVERY_S


@pytest.mark.timeout(600)
def test_a_cluster_uses_the_tls_of_ray_too(tmp_path: Path) -> None:
    variables = {
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_CERT": f"{HOME}/ray/tls.crt",
        "RAY_TLS_SERVER_KEY": f"{HOME}/ray/tls.key",
        "RAY_TLS_CA_CERT": f"{HOME}/ray/ca.crt",
    }
    authority = new_authority()
    with training_room(tmp_path, NODES, variables=variables) as room:
        for name in ("head", *NODES):
            host = room.room[name]
            certificate, key = addressed(authority, host.address, "127.0.0.1")
            host.write(f"{HOME}/ray/ca.crt", pem_of(authority.certificate))
            host.write(f"{HOME}/ray/tls.crt", certificate)
            host.write(f"{HOME}/ray/tls.key", key)
        room.up("--no-training --tls")
        for name in NODES:
            room.copy_certificates(name)
        room.copy_token("a")
        plain = f"unset RAY_USE_TLS; {JOIN} --tls-dir tls"
        assert "set RAY_USE_TLS and RAY_TLS_* here as there" in refusal(room, "a", plain)
        room.join(*NODES, options=f"{MACHINE} --tls-dir tls")
        assert seconds_to_recover(room) < RECOVERY_S
