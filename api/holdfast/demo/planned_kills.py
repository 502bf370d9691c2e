"""The planned faults of the demo: kills one rank, later every process on the node of rank 0."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from holdfast.cli.printing import output
from holdfast.client.synchronous.client import Client
from holdfast_service.embedded_cluster import local_cluster
from holdfast_service.job_model.lifecycle import State
from holdfast_service.views.attempts import MemberView
from holdfast_service.views.jobs import JobView
from holdfast_service.views.wording import ranks_text


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
        if job.progress.step >= steps * (self._kills_done + 1) // (len(kills) + 1):
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
