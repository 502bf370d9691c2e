"""What is said about four programs that people bring, against what happened to them: a rank killed,
a rank stopped, a node lost, the server away for a minute, Ray's head lost. On real raylets."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.end_to_end.conftest import Product
from tests.service.views.test_incident_facts import CLAIMS
from tests.support.programs import environments
from tests.support.service.ray_processes import RayProcesses, ray_processes

from holdfast.schemas import ServerFile
from holdfast_service.views.incidents import IncidentView

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(1200)]

EXAMPLES = Path(__file__).parents[2] / "examples"
AWAY_S = 65.0
"""Longer than a server's lease, and longer than Ray waits for its GCS by default."""
REACHED_S = 240.0
STEPS = 100_000
"""More than there is time for: the job is cancelled at the end."""
WATCHED = {"silence_s": 20.0, "step_limit_s": 5.0}


@dataclass(frozen=True)
class Brought:
    """A program, and what of its incidents can be known."""

    job: Callable[[Path], dict[str, Any]]
    level: int


def _script(folder: Path) -> dict[str, Any]:
    return {
        "code": str(EXAMPLES / "bring"),
        "script": f"ddp.py --steps {STEPS} --pause 0.1 --folder {folder}",
        "program": {**WATCHED, "metrics": "step (?P<step>[0-9]+) loss (?P<loss>[-+.e0-9]+)"},
    }


def _trainer(folder: Path) -> dict[str, Any]:
    return {
        "code": str(EXAMPLES / "bring"),
        "script": f"transformers_fit.py --steps {STEPS} --pause 0.1 --folder {folder}",
        "program": {**WATCHED, "preload": ["transformers", "accelerate"]},
        "runtime_env": {"pip": list(environments.TRANSFORMERS)},
    }


def _ray_train(folder: Path) -> dict[str, Any]:
    return {
        "code": str(EXAMPLES / "ray_train"),
        "ray_train": "train:train_loop_per_worker",
        "config": {"lr": 0.02, "epochs": STEPS},
        "ray_run": {"storage_path": str(folder)},
        "program": WATCHED,
        "checkpoint": {"memory": {"every_steps": 1}},
    }


def _function(_folder: Path) -> dict[str, Any]:
    return {
        "code": str(EXAMPLES / "spirals"),
        "function": "train:main",
        "config": {"width": 512, "lr": 0.003},
        "train": {"steps": STEPS, "global_batch": 4096, "micro_batch": 1024},
    }


PROGRAMS = {
    "script": Brought(_script, level=0),
    "trainer": Brought(_trainer, level=2),
    "ray-train": Brought(_ray_train, level=2),
    "function": Brought(_function, level=3),
}


@dataclass
class Room:
    cluster: RayProcesses
    server: Product


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Room]:
    with ray_processes(redis=True, nodes=3) as cluster:
        server = Product(tmp_path_factory.mktemp("product"), cluster)
        try:
            server.start()
            yield Room(cluster, server)
        finally:
            if server.process is not None and server.process.poll() is None:
                server.stop()


@dataclass
class Story:
    """A job, and what is done to it."""

    room: Room
    job_id: str
    expected: list[tuple[str, frozenset[int]]] = field(default_factory=list)
    """Of each incident: the words of its causes, and the ranks that it may name first."""

    @property
    def server(self) -> Product:
        return self.room.server

    def step_on(self, by: int = 15) -> None:
        """Wait until the newest attempt has made so many steps more."""
        before = self.server.client.get(self.job_id).progress.step or 0
        self.server.wait_step(self.job_id, before + by, REACHED_S)

    def recover(self, cause: str, *ranks: int) -> None:
        """Wait until a further incident is over and steps follow it."""
        self.expected.append((cause, frozenset(ranks)))
        client, number = self.server.client, len(self.expected)

        def is_over() -> bool:
            incidents = client.incidents(self.job_id)
            return len(incidents) >= number and incidents[-1].closed_at is not None

        self.server.wait(is_over, REACHED_S)
        self.step_on(by=5)

    def pid(self, rank: int) -> int:
        found = self.server.members(self.job_id)[rank].pid
        assert found is not None
        return found

    def steps_by_attempt(self) -> dict[int, list[int]]:
        """The steps that the rows of each attempt tell, ascending; also those discarded later."""
        known = ServerFile.model_validate_json((self.server.data_dir / "server.json").read_text())
        found: dict[int, set[int]] = {}
        query: dict[str, str | int] = {"name": "loss", "discarded": "true", "limit": 10_000}
        while True:
            answer = httpx.get(
                f"{known.address}/api/v1/jobs/{self.job_id}/metrics",
                params=query,
                headers={"Authorization": f"Bearer {known.token}"},
                timeout=60,
            )
            page = answer.raise_for_status().json()
            for point in [*page["items"], *(p for run in page["discarded"] for p in run["points"])]:
                found.setdefault(point["attempt"], set()).add(point["step"])
            if page["next_cursor"] is not None:
                query["cursor"] = page["next_cursor"]
            else:
                return {attempt: sorted(steps) for attempt, steps in sorted(found.items())}


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_sentence_is_what_happened(room: Room, tmp_path: Path, name: str) -> None:
    server, client, brought = room.server, room.server.client, PROGRAMS[name]
    job = client.submit(
        {
            "name": name,
            "parallel": {"dp_shard": 2},
            "resources": {"cpus_per_worker": 0.5, "workers_per_node": 1, "standby_nodes": 1},
            **brought.job(tmp_path / "saved"),
        }
    )
    story = Story(room, job.id)
    server.wait_step(job.id, 15, REACHED_S)

    os.kill(story.pid(1), signal.SIGKILL)
    story.recover("worker_crash", 1)
    story.step_on()
    os.kill(story.pid(0), signal.SIGSTOP)
    story.recover("hang", 0)
    story.step_on()
    node = room.cluster.names[server.members(job.id)[1].node_id]
    room.cluster.kill(node)
    story.recover("node_lost", 1)
    room.cluster.start(node, 2)
    story.step_on()

    before = client.incidents(job.id)
    steps = client.get(job.id).progress.step or 0
    server.kill()
    time.sleep(AWAY_S)
    server.start()
    client = server.client
    server.wait_step(job.id, steps + 20, REACHED_S)
    room.cluster.kill("gcs")
    room.cluster.kill("head")
    time.sleep(5)
    room.cluster.start("head")
    story.step_on(by=30)

    incidents = client.incidents(job.id)
    assert incidents == before, "the ranks continue without the server and without the head"
    by_attempt = story.steps_by_attempt()
    made = by_attempt[max(by_attempt)]
    if len(made) > 1:
        assert made == list(range(made[0], made[-1] + 1)), "a step of the time away is missing"
    for incident, (cause, ranks) in zip(incidents, story.expected, strict=True):
        _check(incident, cause, ranks, by_attempt, brought)
    client.cancel(job.id)
    ended = server.finish(job.id, REACHED_S)
    verdict, account = client.verdict(job.id), client.goodput(job.id)
    print(json.dumps({"verdict": verdict.model_dump(mode="json"), "steps": ended.progress.step}))
    assert "It survived 3 faults" in (verdict.last or "")
    held = sum(account.by_kind_s.values())
    assert held == pytest.approx(account.held_s, rel=0.01)
    assert account.steps_replayed == sum(incident.steps_lost or 0 for incident in incidents)


def _check(
    incident: IncidentView,
    cause: str,
    ranks: frozenset[int],
    by_attempt: dict[int, list[int]],
    brought: Brought,
) -> None:
    """Its record is what the rows of its attempts tell, and no sentence claims more."""
    said = " ".join(part.text for part in incident.text)
    assert incident.cause == cause, said
    assert incident.level == brought.level
    assert incident.suspects == () or incident.suspects[0].rank in ranks, said
    before, after = by_attempt[incident.attempt], by_attempt[incident.attempt + 1]
    assert incident.restored_step == after[0] - 1, said
    assert incident.steps_lost == before[-1] - incident.restored_step, said
    assert f"step {incident.restored_step}" in said
    for claim in CLAIMS:
        for match in re.finditer(claim.words, said):
            assert claim.is_true(incident, match), (said, claim.words)
