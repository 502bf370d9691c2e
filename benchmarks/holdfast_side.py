"""Measures one SIGKILL under Holdfast, through `serve` and REST; leaves no process behind."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.conditions import POLL_S, BenchmarkFailed, awaited, environment
from benchmarks.figures import AppliedStep, MeasuredFault, last_step, recovered_at
from holdfast.client.synchronous.jobs import Client
from holdfast.errors import Conflict
from holdfast.local_server.child_server import temporary_server
from holdfast_service.views.history import MetricPoint
from holdfast_service.views.incidents import IncidentView

NODES = 3
READY_S = 60.0
START_S = 180.0
RECOVER_S = 120.0
END_S = 60.0


@dataclass(frozen=True)
class RunningServer:
    """The benchmark's own server and its cluster."""

    client: Client
    data_dir: str


@dataclass(frozen=True)
class RunningJob:
    """A job on the benchmark's own server."""

    client: Client
    id: str
    data_dir: str

    def pids(self) -> dict[int, int]:
        """Process id of every rank."""
        newest = self.client.attempts(self.id)[-1]
        return {member.rank: member.pid for member in newest.members if member.pid is not None}

    def points(self) -> list[MetricPoint]:
        return list(self.client.metrics(self.id, ["step_time_s"]))

    def wait_step(self, step: int, timeout_s: float, poll_s: float = POLL_S) -> None:
        """Wait for `step`; raises BenchmarkFailed if the job ends first or is too slow."""

        def is_reached() -> bool:
            found = self.client.get(self.id)
            if found.state.terminal and found.progress.step < step:
                raise BenchmarkFailed(f"ended before step {step}: {self}")
            return found.progress.step >= step

        awaited(is_reached, timeout_s, lambda: f"step {step}: {self}", poll_s)

    def __str__(self) -> str:
        found = self.client.get(self.id)
        state = f"{found.state.value} at step {found.progress.step}"
        return f"the job is {state}: {found.outcome or found.waiting}"


@contextlib.contextmanager
def serving(nodes: int) -> Iterator[RunningServer]:
    """Serve with a cluster of `nodes`; at the end stop the server and all its processes.

    Every process of the cluster can import the benchmarks' own recipes.
    """
    os.environ["PYTHONPATH"] = environment()["PYTHONPATH"]
    with (
        temporary_server(nodes) as server,
        Client(server.address, data_dir=Path(server.data_dir), retry_s=READY_S) as client,
    ):
        client.ready()
        yield RunningServer(client, server.data_dir)


@contextlib.contextmanager
def submitted(server: RunningServer, document: Mapping[str, Any]) -> Iterator[RunningJob]:
    """Submit a job, and cancel it at the end."""
    job = server.client.submit(document)
    yield RunningJob(server.client, job.id, server.data_dir)
    with contextlib.suppress(Conflict):  # the job has already ended
        server.client.cancel(job.id)
    server.client.wait(job.id, END_S)


@contextlib.contextmanager
def running(document: Mapping[str, Any], nodes: int = NODES) -> Iterator[RunningJob]:
    """One job on a server of its own."""
    with serving(nodes) as server, submitted(server, document) as job:
        yield job


def measure(document: Mapping[str, Any], rank: int, after_step: int) -> MeasuredFault:
    """Start, kill `rank` after `after_step` applied steps, wait for the first step beyond."""
    with running(document) as job:
        job.wait_step(after_step, START_S)
        victim = job.pids()[rank]
        killed_at = time.time()
        os.kill(victim, signal.SIGKILL)
        incident = awaited(lambda: _closed_incident(job), RECOVER_S, lambda: f"recovered: {job}")
        recovered = awaited(
            lambda: recovered_at(_commits(job), killed_at), RECOVER_S, lambda: f"a new step: {job}"
        )
        return MeasuredFault(
            rank=rank,
            last_step=last_step(_commits(job), killed_at),
            restored_step=incident.restored_step,
            recovery_s=recovered - killed_at,
            phases_s={name: s for name, s in incident.phases_s.items() if s is not None},
        )


def _closed_incident(job: RunningJob) -> IncidentView | None:
    closed = [each for each in job.client.incidents(job.id) if each.closed_at is not None]
    return closed[-1] if closed else None


def _commits(job: RunningJob) -> list[AppliedStep]:
    """All steps of the history, and the last step of each ended attempt, which may be redone."""
    commits = [AppliedStep(point.attempt, point.step, point.at) for point in job.points()]
    for attempt in job.client.attempts(job.id):
        if attempt.last_step is not None and attempt.ended_at is not None:
            commits.append(AppliedStep(attempt.number, attempt.last_step, attempt.ended_at))
    return commits
