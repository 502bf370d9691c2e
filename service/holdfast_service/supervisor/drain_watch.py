"""Reports which nodes the cluster is about to remove, as inputs of the core.

The query runs outside the supervisor's loop. A cluster that does not answer causes no input.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import structlog

from holdfast_service.recovery.core_state.inputs import NodesDraining
from holdfast_service.supervisor.agent_watch import Agents

_log = structlog.get_logger()


class DrainWatch:
    """Calls `submit_input` from another thread whenever a node is new in the answer."""

    def __init__(self, agents: Agents, submit_input: Callable[[NodesDraining], None]) -> None:
        self._agents = agents
        self._submit_input = submit_input
        self._reported: dict[str, float | None] = {}
        self._failing = False
        self._pending: Future[None] | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="drain-watch")

    def refresh(self) -> None:
        """Start a query unless the last query is still open."""
        if self._pending is None or self._pending.done():
            self._pending = self._pool.submit(self._query)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _query(self) -> None:
        try:
            draining_nodes = self._agents.draining()
        except Exception:  # any error of the cluster's client means: unknown
            if not self._failing:
                _log.exception("the cluster does not report which nodes it drains")
            self._failing = True
            return
        self._failing = False
        if draining_nodes.items() - self._reported.items():
            self._reported.update(draining_nodes)
            self._submit_input(NodesDraining(dict(self._reported)))
