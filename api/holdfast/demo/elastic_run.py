"""Runs an elastic job that loses a node and gets it back, and proves what it computed: every step,
against the job's replay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from holdfast.cli.printing import output
from holdfast.client.synchronous.jobs import Client
from holdfast.demo.compare import RunComparison, compare
from holdfast.demo.run import demo_server, follow, report_fault, samples, watch
from holdfast_service.embedded_cluster import local_cluster
from holdfast_service.embedded_cluster.local_cluster import LocalCluster, LocalClusterError
from holdfast_service.job_model.lifecycle import State
from holdfast_service.views.attempts import AttemptView
from holdfast_service.views.jobs import JobView
from holdfast_service.wording import ranks_text

LOST_AT = 10
"""The node is lost after a tenth of the steps, so that the world has grown before the last step."""
STEPS_WITHOUT = 5
"""Steps of the smaller world before the node comes back."""


@dataclass(frozen=True)
class ElasticVerdict:
    """The result of the elastic demo. `sizes`: ranks of each world that made a step."""

    job: JobView
    sizes: tuple[int, ...]
    comparisons: tuple[RunComparison, ...]

    @property
    def resized(self) -> bool:
        """The world shrank, and had its first size again at the end."""
        return min(self.sizes, default=0) < max(self.sizes, default=0) == self.sizes[-1]

    @property
    def passed(self) -> bool:
        return (
            self.job.state is State.SUCCEEDED
            and self.resized
            and all(comparison.same for comparison in self.comparisons)
        )

    def plain(self) -> dict[str, Any]:
        """The verdict as a JSON object."""
        return {
            "passed": self.passed,
            "ranks": list(self.sizes),
            "job": self.job.id,
            "compared": [comparison.plain() for comparison in self.comparisons],
        }


def run(document: Mapping[str, Any], console: Console) -> ElasticVerdict:
    """Start a server, run the job with a lost node, prove it, stop the server.

    Raises HoldfastError.
    """
    with demo_server(console) as (client, data_dir):
        console.print("\n1. An elastic job loses a node and gets it back", style="bold")
        outage = NodeOutage(client, data_dir, partial(report_fault, console))
        job = follow(client, console, document, outage)
        sizes = _sizes(client, job)
        console.print("\n2. Its replay: the same meshes, without faults", style="bold")
        verdict = ElasticVerdict(job, sizes, _proof(client, console, job))
        console.print("\n3. The comparison", style="bold")
        _print_verdict(console, verdict)
    return verdict


def _proof(client: Client, console: Console, resized: JobView) -> tuple[RunComparison, ...]:
    """Replay the job without faults, on the same meshes at the same steps, and compare every step.

    All state must have the same bits, and each sample must have been read once in spite of the
    resizes. A step before an unplanned resize has no digest if the fault prevented its report.
    Raises HoldfastError.
    """
    replay = watch(client, console, client.replay(resized.id), None)
    found = client.comparison(replay.id)
    first = found.first_difference
    differing = (first.step,) if first is not None else ()
    return (
        RunComparison("digest of all state", found.compared, found.equal, differing, ()),
        compare(
            "samples consumed",
            resized.progress.steps or 0,
            samples(client, replay.id),
            samples(client, resized.id),
        ),
    )


def _sizes(client: Client, job: JobView) -> tuple[int, ...]:
    attempts = sorted(client.attempts(job.id), key=lambda attempt: attempt.number)
    return tuple(attempt.world_size for attempt in attempts if attempt.first_step is not None)


def _print_verdict(console: Console, verdict: ElasticVerdict) -> None:
    ranks = " -> ".join(map(str, verdict.sizes))
    console.print(f"ranks of the world: {ranks}", style="green" if verdict.resized else "bold red")
    for comparison in verdict.comparisons:
        console.print(str(comparison), style="green" if comparison.same else "bold red")
    if not verdict.resized:
        console.print(
            "The world did not shrink and grow again: the job ended too soon.", style="bold red"
        )
    console.print(
        "The job has the bits of its replay in every step, whichever nodes there were."
        if verdict.passed
        else "THE DEMO FAILED.",
        style="bold green" if verdict.passed else "bold red",
    )


class NodeOutage:
    """Watches a job; ends the node of its last rank, and later adds a node to the cluster."""

    def __init__(self, client: Client, data_dir: Path, report: Callable[[str], None]) -> None:
        self._client = client
        self._data_dir = data_dir
        self._report = report
        self._lost_from: AttemptView | None = None
        self._is_back = False

    def __call__(self, job: JobView) -> None:
        if job.state is not State.RUNNING or self._is_back:
            return
        cluster = local_cluster.find(self._data_dir)
        if cluster is None:
            return
        if self._lost_from is None:
            if (job.progress.step or 0) >= max(1, (job.progress.steps or 0) // LOST_AT):
                self._lost_from = self._lose_a_node(job, cluster)
        elif self._has_trained_without(job, self._lost_from):
            self._return_a_node(job, cluster)

    def _lose_a_node(self, job: JobView, cluster: LocalCluster) -> AttemptView:
        attempt = self._newest(job)
        node_id = max(attempt.members, key=lambda member: member.rank).node_id
        ranks = ranks_text(m.rank for m in attempt.members if m.node_id == node_id)
        shorten = output.NodeIdShortener(member.node_id for member in attempt.members)
        killed = local_cluster.kill_node(cluster, node_id)
        self._report(
            f"kill -9 ends all {len(killed)} processes of node {shorten(node_id)} at step "
            f"{job.progress.step}: {ranks}, its agent and its raylet; there is no standby"
        )
        return attempt

    def _has_trained_without(self, job: JobView, lost_from: AttemptView) -> bool:
        newest = self._newest(job)
        is_smaller = newest.world_size < lost_from.world_size
        if not is_smaller or newest.first_step is None:
            return False
        return (job.progress.step or 0) >= newest.first_step + STEPS_WITHOUT

    def _return_a_node(self, job: JobView, cluster: LocalCluster) -> None:
        self._report(f"a node joins the cluster at step {job.progress.step}")
        try:
            local_cluster.add_node(cluster)
        except LocalClusterError as error:  # a raylet that starts too slowly: the next poll repeats
            self._report(str(error))
        else:
            self._is_back = True

    def _newest(self, job: JobView) -> AttemptView:
        return max(self._client.attempts(job.id), key=lambda attempt: attempt.number)
