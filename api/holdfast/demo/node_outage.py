"""The planned outage of the elastic demo: a node is lost, and some steps later it comes back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from holdfast.cli.printing import output
from holdfast.client.synchronous.client import Client
from holdfast_service.embedded_cluster import local_cluster
from holdfast_service.embedded_cluster.local_cluster import LocalCluster, LocalClusterError
from holdfast_service.job_model.lifecycle import State
from holdfast_service.views.attempts import AttemptView
from holdfast_service.views.jobs import JobView
from holdfast_service.views.wording import ranks_text

LOST_AT = 10
"""The node is lost after a tenth of the steps, so that the world has grown before the last step."""
STEPS_WITHOUT = 5
"""Steps of the smaller world before the node comes back."""


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
            if job.progress.step >= max(1, (job.progress.steps or 0) // LOST_AT):
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
        return job.progress.step >= newest.first_step + STEPS_WITHOUT

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
