"""Measures recoveries under Holdfast, through `serve` and REST; leaves no process behind."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.conditions import POLL_S, BenchmarkFailed, awaited, environment
from benchmarks.figures import AppliedStep, Recovery, recovery
from holdfast.client.synchronous.jobs import Client
from holdfast.errors import Conflict
from holdfast.local_server.child_server import temporary_server
from holdfast_service.embedded_cluster import local_cluster
from holdfast_service.embedded_cluster.local_cluster import LocalCluster
from holdfast_service.views.attempts import AttemptView
from holdfast_service.views.history import MetricPoint

NODES = 3
READY_S = 60.0
START_S = 180.0
RECOVER_S = 300.0
"""Longest recovery. A node that returns has to start its processes first, on a machine whose
processors the ranks of the other nodes use."""
END_S = 60.0
LOOK_S = 0.25
"""Between two looks for a recovery. The steps tell when it was over; looking costs the job some
processor time."""
OVERLAP_STEPS = 20
"""Steps before a recovery that are read again; more than a world can lose."""


def present_cluster(folder: Path) -> LocalCluster:
    """The embedded cluster with its present nodes. Raises BenchmarkFailed if it has ended."""
    found = local_cluster.find(folder)
    if found is None:
        raise BenchmarkFailed("the embedded cluster has ended")
    return found


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

    def attempts(self) -> list[AttemptView]:
        return sorted(self.client.attempts(self.id), key=lambda attempt: attempt.number)

    @property
    def cluster(self) -> LocalCluster:
        return present_cluster(Path(self.data_dir))

    def members(self) -> list[tuple[str, int]]:
        """Node and process of each rank of the newest attempt."""
        members = sorted(self.attempts()[-1].members, key=lambda member: member.rank)
        return [(member.node_id, member.pid) for member in members if member.pid is not None]

    def points(self, after: int = 0) -> list[MetricPoint]:
        return list(self.client.metrics(self.id, ["step_time_s"], after))

    def wait_step(self, step: int, timeout_s: float, poll_s: float = POLL_S) -> None:
        """Wait for `step`; raises BenchmarkFailed if the job ends first or is too slow."""

        def is_reached() -> bool:
            found = self.client.get(self.id)
            if found.state.terminal and (found.progress.step or 0) < step:
                raise BenchmarkFailed(f"ended before step {step}: {self}")
            return (found.progress.step or 0) >= step

        awaited(is_reached, timeout_s, lambda: f"step {step}: {self}", poll_s)

    def settle(self, ranks: int, steps: int) -> None:
        """Wait for `steps` more steps, of however many ranks."""
        self.wait_step((self.client.get(self.id).progress.step or 0) + steps, START_S)

    def resize(self, nodes: int) -> None:
        self.client.resize(self.id, nodes)

    def recovery_from(self, cause: Callable[[], object], ranks: int) -> Recovery:
        """Call `cause`, and wait for a new step of `ranks` ranks."""
        old, at = self.attempts()[-1], time.time()
        cause()
        return awaited(
            lambda: self._recovery(old, ranks, at),
            RECOVER_S,
            lambda: f"a new step of {ranks} ranks: {self}",
            LOOK_S,
        )

    def _recovery(self, old: AttemptView, ranks: int, at: float) -> Recovery | None:
        *before, newest = self.attempts()
        is_new = newest.number > old.number and newest.world_size == ranks
        incidents = self.client.incidents(self.id)
        causes = [each for each in incidents if each.number == newest.cause_incident]
        if not is_new or any(each.closed_at is None for each in causes):
            return None
        reached = max(attempt.last_step or 0 for attempt in before)
        points = self.points(max(0, reached - OVERLAP_STEPS))
        steps = [AppliedStep(point.attempt, point.step, point.at) for point in points]
        measured = [phase for each in causes for phase in each.phases_s.items()]
        phases_s = {name: round(s, 4) for name, s in measured if s is not None}
        return recovery(steps, at, newest.number, reached=reached, phases_s=phases_s)

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


def measure(document: Mapping[str, Any], rank: int, after_step: int) -> Recovery:
    """Start, kill `rank` after `after_step` applied steps, wait for the first step beyond."""
    with running(document) as job:
        job.wait_step(after_step, START_S)
        members = job.members()
        kill = partial(os.kill, members[rank][1], signal.SIGKILL)
        return job.recovery_from(kill, len(members))
