"""Ray's head is lost under a real server: its GCS, which keeps its state in Redis, and the raylet
that the server is attached to. Training goes on, and the server finds the cluster again by itself.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from tests.end_to_end.conftest import ONE_NODE, Product, spec
from tests.support.service.ray_processes import RayProcesses, ray_processes
from tests.support.waiting import eventually

from holdfast_service.views.jobs import JobView

pytestmark = [pytest.mark.cluster, pytest.mark.chaos]
AWAY_S = 20.0
COMPARED = 150
"""Steps of the undisturbed job: more than the other had made when its rank was killed."""


@dataclass
class Room:
    cluster: RayProcesses
    server: Product


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Room]:
    with ray_processes(redis=True, nodes=2) as cluster:
        server = Product(tmp_path_factory.mktemp("product"), cluster)
        try:
            server.start()
            yield Room(cluster, server)
        finally:
            if server.process is not None and server.process.poll() is None:
                server.stop()


def document(name: str, steps: int) -> dict[str, Any]:
    whole = spec(name=name, **ONE_NODE)
    train = {"steps": steps, "schedule": {"name": "constant", "warmup_steps": 0}}
    return {**whole, "train": {**whole["train"], **train}}


def not_ready(server: Product) -> str:
    """Why the server is not ready; "" if it is."""
    answer = httpx.get(f"{server.client.address}/readyz", timeout=20)
    return "" if answer.status_code == 200 else str(answer.json()["detail"])


def waits_for(job: JobView) -> str:
    return job.waiting.reason if job.waiting is not None else ""


def test_no_step_is_lost_and_a_rank_is_replaced_while_the_gcs_is_away(room: Room) -> None:
    survive(room, AWAY_S)


@pytest.mark.soak
def test_the_same_for_longer_than_ray_waits_for_its_gcs_by_default(room: Room) -> None:
    survive(room, 65.0)


def survive(room: Room, away_s: float) -> None:
    server, client = room.server, room.server.client
    job = client.submit(document("trains-on", 100_000)).id
    server.wait_step(job, 20)

    room.cluster.kill("gcs")
    gone = time.monotonic()
    eventually(lambda: "GCS" in not_ready(server), 15.0, "the server says that it is ready")
    before = client.get(job).progress.step
    worker = server.members(job)[0].pid
    assert worker is not None
    os.kill(worker, signal.SIGKILL)
    server.wait(lambda: bool(client.incidents(job)), 10.0)
    server.wait(lambda: client.incidents(job)[-1].closed_at is not None, 10.0)
    recovered = client.get(job).progress.step
    later = client.submit(document("accepted-meanwhile", COMPARED)).id
    eventually(lambda: "GCS" in waits_for(client.get(later)), 10.0)
    time.sleep(max(0.0, away_s - (time.monotonic() - gone)))
    made = client.get(job).progress.step
    assert made > recovered > before, "no step was made"
    assert client.get(later).state == "QUEUED"

    room.cluster.start_gcs()
    back = time.monotonic()
    eventually(lambda: not not_ready(server), 30.0, lambda: not_ready(server))
    ready_s = time.monotonic() - back
    assert server.finish(later, 60.0).state == "SUCCEEDED"
    (incident,) = client.incidents(job)
    client.cancel(job)
    server.finish(job)
    print(f"{made - before} steps in {away_s:.0f} s; recovery {incident.phases_s}; {ready_s=:.1f}")
    assert incident.steps_lost == 0
    assert client.digests(later).items() <= client.digests(job).items()
