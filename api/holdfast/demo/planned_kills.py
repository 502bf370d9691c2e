"""The bad day: SIGKILL for one rank, later for everything on the node that holds rank 0."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from holdfast.client.client import Client
from holdfast_service.embedded_cluster import local_cluster
from holdfast_service.job_model.lifecycle import State
from holdfast_service.views.jobs import JobView, MemberView


class Mischief:
    """Watches a job and strikes at a third and at two thirds of its steps."""

    def __init__(self, client: Client, data_dir: Path, say: Callable[[str], None]) -> None:
        self._client = client
        self._data_dir = data_dir
        self._say = say
        self._struck = 0

    def __call__(self, job: JobView) -> None:
        """Look at the job; strike if it is time, but never while it still gets over the last."""
        strikes = (self._kill_a_rank, self._kill_rank_zeros_node)
        if self._struck == len(strikes) or job.state is not State.RUNNING:
            return
        if job.progress.step >= job.progress.steps * (self._struck + 1) // (len(strikes) + 1):
            strikes[self._struck](job)
            self._struck += 1

    def _kill_a_rank(self, job: JobView) -> None:
        victim = self._members(job)[-1]
        if victim.pid is None:
            return
        self._say(f"kill -9 {victim.pid}: rank {victim.rank} (step {job.progress.step})")
        os.kill(victim.pid, signal.SIGKILL)

    def _kill_rank_zeros_node(self, job: JobView) -> None:
        members = self._members(job)
        node_id = members[0].node_id
        ranks = ", ".join(str(member.rank) for member in members if member.node_id == node_id)
        cluster = local_cluster.find(self._data_dir)
        if cluster is None:
            return
        killed = local_cluster.kill_node(cluster, node_id)
        self._say(
            f"kill -9 the node {node_id[:8]} with rank(s) {ranks}: its raylet, its agent and all "
            f"else on it, {len(killed)} processes (step {job.progress.step})"
        )

    def _members(self, job: JobView) -> list[MemberView]:
        """Those of the newest attempt, by rank."""
        newest = self._client.attempts(job.id)[-1]
        return sorted(newest.members, key=lambda member: member.rank)
