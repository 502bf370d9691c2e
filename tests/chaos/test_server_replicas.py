"""Two API servers of one PostgreSQL, either of which is killed at random moments: no job is lost or
run twice, and streams go on at the other server.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from tests.end_to_end.conftest import spec
from tests.support.service.databases import fast_settings, new_database, run_in_thread
from tests.support.service.durable_cluster import STEPS, DurableCluster
from tests.support.service.job_drives import JOB
from tests.support.service.ray_processes import ray_processes
from tests.support.service.server_replicas import Follower, Replicas, replicas

from holdfast_service.views.jobs import JobView

pytestmark = [pytest.mark.chaos]
END_S = 120.0
SEED = int(os.environ.get("HOLDFAST_TEST_SEED", "5"))


class Killer:
    """Kills one server after the other and starts it again, until it is stopped."""

    def __init__(self, servers: Replicas, rng: random.Random, longest_pause_s: float) -> None:
        self.kills = 0
        self._servers, self._rng, self._pause_s = servers, rng, longest_pause_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._kill, daemon=True)

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _kill(self) -> None:
        while not self._over.wait(self._rng.uniform(0.0, self._pause_s)):
            victim = self._rng.randrange(2)
            self._servers.kill(victim)
            self.kills += 1
            self._over.wait(self._rng.uniform(0.0, self._pause_s / 4))
            self._servers.start(victim)
            self._servers.wait_started(victim)


@dataclass(frozen=True)
class Ran:
    jobs: dict[str, JobView]
    """The ended jobs."""
    streams: dict[str, list[int]]
    """The numbers of the events of each, as they were streamed."""
    kills: int


def run_jobs(
    servers: Replicas,
    document: dict[str, Any],
    *,
    jobs: int,
    kills: int,
    at_once: int,
    pause_s: float,
) -> Ran:
    """Run jobs, `at_once` at the same time, until there were so many of them and so many kills."""
    client = servers.client
    running: dict[str, Follower] = {}
    ran = Ran({}, {}, 0)
    with Killer(servers, random.Random(SEED), pause_s) as killer:
        while running or len(ran.jobs) < jobs or killer.kills < kills:
            wanted = len(ran.jobs) + len(running) < jobs or killer.kills < kills
            if wanted and len(running) < at_once:
                job = client.submit({**document, "name": f"job-{len(ran.jobs) + len(running)}"})
                running[job.id] = Follower(client, job.id)
            for job_id, follower in list(running.items()):
                if client.get(job_id).state.terminal:
                    ran.streams[job_id] = follower.wait(END_S)
                    ran.jobs[job_id] = client.get(job_id)
                    del running[job_id]
            time.sleep(0.05)
    return replace(ran, kills=killer.kills)


@pytest.mark.cell("P1", "server")
@pytest.mark.cell("P1", "database")
def test_servers_that_are_killed_in_turn_lose_no_job_and_run_none_twice(
    postgres_server: Any, tmp_path: Path
) -> None:
    url = run_in_thread(new_database(postgres_server))
    settings = fast_settings(tmp_path, url, lease_s=1.0)
    cluster = DurableCluster(tmp_path)

    def command(port: int) -> list[str]:
        own = settings.model_copy(update={"port": port})
        program = "tests.support.service.server_replicas"
        return [sys.executable, "-m", program, own.model_dump_json(), str(tmp_path)]

    with replicas(command, tmp_path / "servers.log") as servers:
        ran = run_jobs(servers, JOB, jobs=8, kills=3, at_once=4, pause_s=1.0)
        print(f"{len(ran.jobs)} jobs, {ran.kills} kills, seed {SEED}")
        check(servers, ran)
        for job in ran.jobs:
            assert set(servers.client.digests(job)) == set(range(1, STEPS + 1))
    assert sorted(cluster.started()) == sorted(ran.jobs), "each job started once"


def check(servers: Replicas, ran: Ran) -> None:
    """Nothing was lost or doubled."""
    assert [job.outcome for job in ran.jobs.values() if job.state != "SUCCEEDED"] == []
    assert {job.id for job in servers.client.list()} == ran.jobs.keys()
    for numbers in ran.streams.values():
        assert numbers == list(range(1, len(numbers) + 1)), "each event once, in order"
    for job in ran.jobs:
        kinds = [event.kind for event in servers.client.all_events(job)]
        for once in ("job.submitted", "attempt.forming", "ended"):
            assert kinds.count(once) == 1, (job, once)


@pytest.fixture
def real_servers(
    postgres_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Replicas]:
    url = run_in_thread(new_database(postgres_server))
    with (
        ray_processes(redis=False, nodes=2, cpus=2) as cluster,
        pytest.MonkeyPatch.context() as env,
    ):
        # The balancer is no server of this user: a client has no token for it.
        settings = {"HOLDFAST_DATABASE_URL": url, "HOLDFAST_AUTH": "none"}
        for name, value in {**cluster.environment(), **settings}.items():
            env.setenv(name, value)

        def command(port: int) -> list[str]:
            serve = [sys.executable, "-m", "holdfast", "serve", "--port", str(port)]
            places = ("--data-dir", str(tmp_path / "data"), "--store-uri", str(tmp_path / "store"))
            return [*serve, *places, "--ray-address", cluster.address]

        with replicas(command, tmp_path / "servers.log") as servers:
            yield servers


@pytest.mark.soak
@pytest.mark.cluster
@pytest.mark.timeout(3_600)
def test_fifty_real_jobs_outlive_servers_that_are_killed_in_turn(real_servers: Replicas) -> None:
    jobs = int(os.environ.get("HOLDFAST_TEST_JOBS", "50"))
    size = {
        "parallel": {"dp_shard": 1},
        "resources": {"cpus_per_worker": 1, "workers_per_node": 1, "standby_nodes": 0},
    }
    began = time.monotonic()
    ran = run_jobs(real_servers, spec(**size), jobs=jobs, kills=3, at_once=3, pause_s=8.0)
    print(f"{jobs} jobs in {time.monotonic() - began:.0f} s, {ran.kills} kills, seed {SEED}")
    check(real_servers, ran)
    digests = [real_servers.client.digests(job) for job in ran.jobs]
    assert all(each == digests[0] for each in digests)
