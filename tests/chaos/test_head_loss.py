"""Ray's head is lost under a real server: its GCS, which keeps its state in Redis, and the raylet
that the server is attached to. Training goes on, and the server finds the cluster again by itself.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.end_to_end.conftest import ONE_NODE, Product, served, spec
from tests.support.service.ray_processes import RayProcesses, ray_processes
from tests.support.waiting import DEADLINE_S, eventually

from holdfast_service.views.jobs import JobView

pytestmark = [pytest.mark.cluster, pytest.mark.chaos, pytest.mark.soak]
AWAY_S = 65.0
"""Longer than Ray waits for its GCS by default."""


@dataclass
class Room:
    cluster: RayProcesses
    server: Product
    job: str
    """Trains all the time."""


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Room]:
    with ray_processes(redis=True, nodes=2) as cluster:
        folder = tmp_path_factory.mktemp("product")
        server = Product(folder, cluster)
        try:
            server.start()
            job = server.client.submit(document("trains-on", 100_000)).id
            server.wait_step(job, 5)
            yield Room(cluster, server, job)
        finally:
            if server.process is not None and server.process.poll() is None:
                server.stop()


def document(name: str, steps: int) -> dict[str, Any]:
    whole = spec(name=name, **ONE_NODE)
    train = {"steps": steps, "schedule": {"name": "constant", "warmup_steps": 0}}
    return {**whole, "train": {**whole["train"], **train}}


def not_ready(server: Product) -> str:
    """Why the server is not ready; "" if it is."""
    answer = httpx.get(f"{server.client.address}/readyz", timeout=DEADLINE_S)
    return "" if answer.status_code == 200 else str(answer.json()["detail"])


def waits_for(job: JobView) -> str:
    return job.waiting.reason if job.waiting is not None else ""


def test_no_step_is_lost_and_a_rank_is_replaced_while_the_gcs_is_away(room: Room) -> None:
    server, client, job = room.server, room.server.client, room.job
    incidents = len(client.incidents(job))
    room.cluster.kill("gcs")
    gone = time.monotonic()
    eventually(lambda: "GCS" in not_ready(server), failure_message="the server is ready")
    before = client.get(job).progress.step or 0
    server.kill_rank(job, 0)
    server.wait(lambda: len(client.incidents(job)) > incidents)
    server.wait(lambda: client.incidents(job)[-1].closed_at is not None)
    incident = client.incidents(job)[-1]
    recovered = client.get(job).progress.step or 0
    later = client.submit(document("accepted-meanwhile", 5)).id
    eventually(lambda: "GCS" in waits_for(client.get(later)))
    time.sleep(max(0.0, AWAY_S - (time.monotonic() - gone)))
    made = client.get(job).progress.step or 0
    assert made > recovered > before, "no step was made"
    assert client.get(later).state == "QUEUED"

    room.cluster.start_gcs()
    back = time.monotonic()
    eventually(lambda: not not_ready(server), failure_message=lambda: not_ready(server))
    ready_s = time.monotonic() - back
    print(f"{made - before} steps in {AWAY_S:.0f} s; recovery {incident.phases_s}; {ready_s=:.1f}")
    assert server.finish(later, 60.0).state == "SUCCEEDED"
    assert (incident.steps_lost or 0) <= 1, "the step that was under way"
    assert set(client.digests(job)) >= set(range(1, made)), "a step is missing"
    assert client.digests(later).items() <= client.digests(job).items()


def test_a_head_that_dies_as_a_whole_is_found_again_when_it_is_back(room: Room) -> None:
    """With its raylet, to which the server is attached, and with the supervisors beside it."""
    server, client, job = room.server, room.server.client, room.job
    before = client.incidents(job)
    room.cluster.kill("gcs")
    room.cluster.kill("head")
    eventually(lambda: "GCS" in not_ready(server), failure_message="the server is ready")

    room.cluster.start("head")
    back = time.monotonic()
    eventually(lambda: "renewed" in server.log.read_text(), 60.0, lambda: not_ready(server))
    renewed_s = time.monotonic() - back
    eventually(lambda: not not_ready(server), failure_message=lambda: not_ready(server))
    server.wait_step(job, (client.get(job).progress.step or 0) + 20, 60.0)
    stepping_s = time.monotonic() - back
    assert client.incidents(job) == before, "the supervisor's successor adopts the running ranks"
    later = client.submit(document("with-the-new-connection", 5)).id
    assert server.finish(later, 60.0).state == "SUCCEEDED"
    print(f"{renewed_s=:.1f}, {stepping_s=:.1f}")


def test_an_embedded_cluster_that_ends_is_followed_by_another(tmp_path: Path) -> None:
    """Its GCS has no store: the job goes on from its remote checkpoint, under the same server."""
    with served(tmp_path) as server:
        job = server.client.submit(spec(**ONE_NODE)).id
        server.wait(lambda: bool(server.client.checkpoints(job).items), 90.0)
        (gcs,) = server.pids_of("gcs_server")
        os.kill(gcs, signal.SIGKILL)
        began = time.monotonic()
        eventually(lambda: "renewed" in server.log.read_text(), 90.0, lambda: not_ready(server))
        print(f"a new cluster after {time.monotonic() - began:.1f} s")
        assert server.finish(job, 180.0).state == "SUCCEEDED"
        assert server.client.attempts(job)[-1].restore.step
