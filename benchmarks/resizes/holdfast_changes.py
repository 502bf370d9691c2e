"""Takes an elastic job under Holdfast through every change; leaves no process behind.

The job runs as a user's does: `serve` and REST. Nodes are killed and added at the embedded cluster.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.conditions import BenchmarkFailed, awaited
from benchmarks.figures import AppliedStep
from benchmarks.holdfast_side import START_S, RunningJob, running
from benchmarks.resizes import nodes
from benchmarks.resizes.changes import Change, MeasuredChange, measure_change
from holdfast_service.embedded_cluster import local_cluster
from holdfast_service.embedded_cluster.local_cluster import LocalCluster, RayHealthCheck
from holdfast_service.views.attempts import AttemptView, MemberView

POLL_S = 0.25
"""Between two looks for a change. The steps tell when it was over; looking costs the job some
processor time."""
CHANGE_S = 120.0
"""Longest wait for a change of the world; a node that returns has to start its processes first."""
OVERLAP_STEPS = 20
"""Steps before a change that are read again; more than a world can lose."""


def measure(
    document: Mapping[str, Any],
    health: RayHealthCheck,
    size: int,
    rounds: int,
    settle_steps: int,
) -> Iterator[MeasuredChange]:
    """Every change once per round, on a cluster of `size` nodes, each as soon as it is measured.

    Between two changes the job makes `settle_steps` steps.
    """
    os.environ["HOLDFAST_PACE__NODE_HEALTH_PERIOD_S"] = str(health.period_s)
    os.environ["HOLDFAST_PACE__NODE_HEALTH_FAILURES"] = str(health.failures)
    with running(document, size) as job:
        world = _ElasticWorld(job, size, settle_steps)
        world.settle(START_S)
        for number in range(rounds):
            yield world.kill_rank(number)
            yield world.lose_node(number)
            yield world.return_node()
            yield world.order(Change.PLANNED_SHRINK, size - 1)
            yield world.order(Change.PLANNED_GROW, size)


class _ElasticWorld:
    def __init__(self, job: RunningJob, size: int, settle_steps: int) -> None:
        self._job = job
        self._size = size
        self._settle_steps = settle_steps

    def settle(self, timeout_s: float = CHANGE_S) -> None:
        step = self._job.client.get(self._job.id).progress.step
        self._job.wait_step(step + self._settle_steps, timeout_s)

    def kill_rank(self, number: int) -> MeasuredChange:
        def kill() -> None:
            member = self._member(number)
            assert member.pid is not None
            os.kill(member.pid, signal.SIGKILL)

        return self._change(Change.IN_PLACE, self._size, kill)

    def lose_node(self, number: int) -> MeasuredChange:
        member, cluster = self._member(number), self._cluster()
        return self._change(
            Change.SHRINK,
            self._size - 1,
            lambda: local_cluster.kill_node(cluster, member.node_id),
        )

    def return_node(self) -> MeasuredChange:
        cluster = self._cluster()
        return self._change(Change.GROW, self._size, lambda: nodes.add(cluster))

    def order(self, change: Change, size: int) -> MeasuredChange:
        job = self._job
        return self._change(change, size, lambda: job.client.resize(job.id, size))

    def _change(self, change: Change, size: int, cause: Callable[[], object]) -> MeasuredChange:
        old = self._attempts()[-1]
        ranks = old.world_size // len({member.node_id for member in old.members}) * size
        at = time.time()
        cause()
        found = awaited(
            lambda: self._measured(change, old, ranks, at),
            CHANGE_S,
            lambda: f"a step of {ranks} ranks after {change.value}: {self._job}",
            POLL_S,
        )
        self.settle()
        return found

    def _measured(
        self, change: Change, old: AttemptView, ranks: int, at: float
    ) -> MeasuredChange | None:
        attempts = self._attempts()
        newest = attempts[-1]
        is_new = newest.number > old.number and newest.world_size == ranks
        if not is_new or newest.first_step is None:
            return None
        reached = max(attempt.last_step or 0 for attempt in attempts[:-1])
        after = max(0, reached - OVERLAP_STEPS)
        commits = [
            AppliedStep(point.attempt, point.step, point.at)
            for point in self._job.client.metrics(self._job.id, ["step_time_s"], after)
        ]
        return measure_change(
            change,
            (old.world_size, ranks),
            at,
            newest.number,
            commits,
            self._phases(newest.cause_incident),
            reached=reached,
        )

    def _phases(self, number: int | None) -> dict[str, float]:
        return {
            name: seconds
            for incident in self._job.client.incidents(self._job.id)
            if incident.number == number
            for name, seconds in incident.phases_s.items()
            if seconds is not None
        }

    def _member(self, number: int) -> MemberView:
        """A member of the present world, another for each number."""
        members = sorted(self._attempts()[-1].members, key=lambda member: member.rank)
        return members[-1 - number % len(members)]

    def _attempts(self) -> list[AttemptView]:
        found = self._job.client.attempts(self._job.id)
        return sorted(found, key=lambda attempt: attempt.number)

    def _cluster(self) -> LocalCluster:
        cluster = local_cluster.find(Path(self._job.data_dir))
        if cluster is None:
            raise BenchmarkFailed("the embedded cluster has ended")
        return cluster
