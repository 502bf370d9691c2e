"""The check of a whole cluster on request: what is wrong with which node, and what to do.

Checks that are requested while one runs get its result.
"""

from __future__ import annotations

import asyncio
import os
import time

from holdfast_service.daemon_threads import DaemonThreads
from holdfast_service.diagnosis.grades import Grade
from holdfast_service.diagnosis.node_faults import NodeFinding, findings
from holdfast_service.errors import ClusterUnreachable
from holdfast_service.job_model.supervisor_protocol import Cluster, ClusterUnavailable
from holdfast_service.remote_tier.location import SecretUnusable, hasty_access
from holdfast_service.remote_tier.server_store import remote_tier_of
from holdfast_service.settings import Settings
from holdfast_service.views.cluster_check import ClusterCheckView, NodeCheckView
from holdfast_workers.health.node_facts import measure
from holdfast_workers.memory.node_folder import memory_base
from holdfast_workers.protocol.processes import StorageOptions

SERVER = "server"
"""Stands for the name of a node in findings about the server itself."""


class ClusterCheck:
    def __init__(self, cluster: Cluster, settings: Settings) -> None:
        self._cluster = cluster
        self._settings = settings
        self._running: asyncio.Task[ClusterCheckView] | None = None
        self._threads = DaemonThreads(1, "cluster-check")

    async def check(self) -> ClusterCheckView:
        """Inspect every node, within `cluster_check_s` and a few seconds. Raises
        ClusterUnreachable."""
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._check(), name="cluster-check")
        return await asyncio.shield(self._running)

    async def _check(self) -> ClusterCheckView:
        began = time.monotonic()
        store, own = self._store()
        try:
            nodes = await self._cluster.inspect(store, self._settings.pace.cluster_check_s)
        except ClusterUnavailable as error:
            raise ClusterUnreachable(f"the cluster does not answer: {error}") from error
        data_dir = self._settings.data_dir
        facts = self._threads.submit(measure, memory_base(os.environ), data_dir)
        server = await asyncio.wrap_future(facts)
        found = [*own, *findings(nodes, server)]
        return ClusterCheckView(
            findings=tuple(NodeCheckView.from_attributes(each) for each in found),
            nodes=len(nodes),
            took_s=time.monotonic() - began,
        )

    def _store(self) -> tuple[tuple[str, StorageOptions] | None, list[NodeFinding]]:
        """The store that nodes need, and what is wrong with its secret."""
        try:
            return hasty_access(remote_tier_of(self._settings), self._settings), []
        except SecretUnusable as error:
            advice = "correct the secret, or --store-secret"
            return None, [
                NodeFinding(SERVER, SERVER, "storage", Grade.BAD, str(error), advice),
            ]
