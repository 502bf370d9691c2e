"""Runs a job twice, without and with faults, and compares every step of the two runs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from holdfast.cli.dashboard import dashboard_link
from holdfast.cli.printing import output
from holdfast.cli.submission.job_follower import JobFollower, Watcher
from holdfast.client.synchronous.jobs import Client
from holdfast.demo.compare import RunComparison, compare
from holdfast.errors import HoldfastError
from holdfast.local_server.child_server import temporary_server
from holdfast_service.embedded_cluster import local_cluster
from holdfast_service.job_model.lifecycle import State
from holdfast_service.views.attempts import MemberView
from holdfast_service.views.jobs import JobView
from holdfast_service.wording import plural, ranks_text

NODES = 3
READY_S = 60.0


@dataclass(frozen=True)
class DemoVerdict:
    """The result of the demo; `passed`: both jobs succeeded, with the same bits in every step."""

    undisturbed: JobView
    disturbed: JobView
    comparisons: tuple[RunComparison, ...]
    incidents: int

    @property
    def passed(self) -> bool:
        ended_well = all(job.state is State.SUCCEEDED for job in (self.undisturbed, self.disturbed))
        return (
            ended_well
            and self.incidents >= 2
            and all(comparison.same for comparison in self.comparisons)
        )

    def plain(self) -> dict[str, Any]:
        """The verdict as a JSON object."""
        return {
            "passed": self.passed,
            "incidents": self.incidents,
            "jobs": [self.undisturbed.id, self.disturbed.id],
            "compared": [comparison.plain() for comparison in self.comparisons],
        }


class JobDidNotSucceed(HoldfastError, code="job_did_not_succeed", status=500):
    """One of the two jobs failed or was cancelled."""


def run(document: Mapping[str, Any], console: Console) -> DemoVerdict:
    """Start a server, run the two jobs, compare them, stop the server. Raises HoldfastError."""
    with demo_server(console) as (client, data_dir):
        console.print("\n1. The job without faults", style="bold")
        undisturbed = follow(client, console, document, None)
        console.print("\n2. The same job with faults", style="bold")
        kills = PlannedKills(client, data_dir, partial(report_fault, console))
        disturbed = follow(client, console, document, kills)
        verdict = _compare(client, undisturbed, disturbed)
        console.print("\n3. The comparison", style="bold")
        _print_verdict(console, verdict)
    return verdict


@contextmanager
def demo_server(console: Console) -> Iterator[tuple[Client, Path]]:
    """A server with a cluster of its own: a client that is connected to it, and its data directory.
    Raises HoldfastError."""
    began = time.monotonic()
    console.print(f"Starting `holdfast serve` with a Ray cluster of {NODES} local nodes")
    with (
        temporary_server(NODES) as server,
        Client(server.address, data_dir=Path(server.data_dir), retry_s=READY_S) as client,
    ):
        client.ready()
        console.print(f"The server at {server.address} is ready after {_since(began)}")
        link = dashboard_link(server.address, client.session_code().code)
        console.print(f"Its dashboard: {link}", soft_wrap=True)
        yield client, Path(server.data_dir)
        console.print(f"Stopping the server (the demo took {_since(began)})")


def report_fault(console: Console, text: str) -> None:
    """Show a fault that the demo causes."""
    console.print(f">>> {text}", style="bold red")


def follow(
    client: Client, console: Console, document: Mapping[str, Any], watcher: Watcher | None
) -> JobView:
    """Submit a job and show it until it has ended. Raises JobDidNotSucceed."""
    return watch(client, console, client.submit(document), watcher)


def watch(client: Client, console: Console, job: JobView, watcher: Watcher | None) -> JobView:
    """Show a job until it has ended. Raises JobDidNotSucceed."""
    job = JobFollower(client, console).follow(job.id, watcher)
    if job.state is not State.SUCCEEDED:
        outcome = job.outcome
        why = f"{outcome.code}: {outcome.message}" if outcome else "without an outcome"
        trace = f"\n{outcome.traceback}" if outcome and outcome.traceback else ""
        raise JobDidNotSucceed(f"job {job.id} ended {job.state.value}: {why}{trace}")
    return job


def _compare(client: Client, undisturbed: JobView, disturbed: JobView) -> DemoVerdict:
    steps = undisturbed.progress.steps or 0
    comparisons = (
        compare(
            "digest of all state",
            steps,
            client.digests(undisturbed.id),
            client.digests(disturbed.id),
        ),
        compare(
            "samples consumed",
            steps,
            samples(client, undisturbed.id),
            samples(client, disturbed.id),
        ),
    )
    return DemoVerdict(undisturbed, disturbed, comparisons, disturbed.progress.incidents)


def samples(client: Client, job_id: str) -> dict[int, Any]:
    """For each step, a digest of the samples that all ranks read."""
    return {point.step: point.values["samples"] for point in client.metrics(job_id, ["samples"])}


def _print_verdict(console: Console, verdict: DemoVerdict) -> None:
    for comparison in verdict.comparisons:
        style = "green" if comparison.same else "bold red"
        console.print(str(comparison), style=style)
    for name, job in (("without", verdict.undisturbed), ("with", verdict.disturbed)):
        if job.started_at is not None and job.ended_at is not None:
            took = output.seconds(job.ended_at - job.started_at)
            console.print(f"The run {name} faults took {took}.")
    if verdict.incidents < 2:
        console.print(
            f"{plural(verdict.incidents, 'incident')} occurred instead of 2: "
            "the job ended too soon.",
            style="bold red",
        )
    console.print(
        "Both runs have the same bits in every step, in spite of the faults."
        if verdict.passed
        else "THE RUNS DIFFER.",
        style="bold green" if verdict.passed else "bold red",
    )


def _since(began: float) -> str:
    """The time since `began`, of the monotonic clock."""
    return output.seconds(time.monotonic() - began)


class PlannedKills:
    """Watches a job and kills at a third and at two thirds of its steps."""

    def __init__(self, client: Client, data_dir: Path, report: Callable[[str], None]) -> None:
        self._client = client
        self._data_dir = data_dir
        self._report = report
        self._kills_done = 0

    def __call__(self, job: JobView) -> None:
        """Kill if it is time, but never while the job still recovers from the previous kill."""
        kills = (self._kill_a_rank, self._kill_rank_zeros_node)
        if self._kills_done == len(kills) or job.state is not State.RUNNING:
            return
        steps = job.progress.steps or 0
        if (job.progress.step or 0) >= steps * (self._kills_done + 1) // (len(kills) + 1):
            kills[self._kills_done](job)
            self._kills_done += 1

    def _kill_a_rank(self, job: JobView) -> None:
        victim = self._members(job)[-1]
        if victim.pid is None:
            return
        self._report(f"kill -9 {victim.pid} ends rank {victim.rank} at step {job.progress.step}")
        os.kill(victim.pid, signal.SIGKILL)

    def _kill_rank_zeros_node(self, job: JobView) -> None:
        members = self._members(job)
        node_id = members[0].node_id
        ranks = ranks_text(member.rank for member in members if member.node_id == node_id)
        shorten = output.NodeIdShortener(member.node_id for member in members)
        cluster = local_cluster.find(self._data_dir)
        if cluster is None:
            return
        killed = local_cluster.kill_node(cluster, node_id)
        self._report(
            f"kill -9 ends all {len(killed)} processes of node {shorten(node_id)} at step "
            f"{job.progress.step}: {ranks}, its agent and its raylet"
        )

    def _members(self, job: JobView) -> list[MemberView]:
        """The members of the newest attempt, by rank."""
        newest = self._client.attempts(job.id)[-1]
        return sorted(newest.members, key=lambda member: member.rank)
