"""Runs an elastic job that loses a node and gets it back, and proves what it computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.console import Console

from holdfast.client.synchronous.client import Client
from holdfast.demo import proof
from holdfast.demo.compare import RunComparison
from holdfast.demo.node_outage import NodeOutage
from holdfast.demo.run import demo_server, follow, report_fault
from holdfast_service.job_model.lifecycle import State
from holdfast_service.views.jobs import JobView


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
        verdict = ElasticVerdict(job, sizes, proof.prove(client, console, job))
        console.print("\n3. The comparison", style="bold")
        _print_verdict(console, verdict)
    return verdict


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
