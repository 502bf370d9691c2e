"""Which nodes the cluster is about to take away: asked beside the supervisor's loop, told as inputs
of the core. A cluster that does not answer says nothing."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import structlog

from holdfast_service.recovery.core_state.inputs import NodesDraining
from holdfast_service.supervisor.agent_watch import Agents

_log = structlog.get_logger()


class DrainWatch:
    """`tell` is called from another thread, whenever something is new."""

    def __init__(self, agents: Agents, tell: Callable[[NodesDraining], None]) -> None:
        self._agents = agents
        self._tell = tell
        self._told: dict[str, float | None] = {}
        self._troubled = False
        self._asked: Future[None] | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="drain-watch")

    def look(self) -> None:
        """Ask once more, unless the last question is still open."""
        if self._asked is None or self._asked.done():
            self._asked = self._pool.submit(self._ask)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _ask(self) -> None:
        try:
            found = self._agents.draining()
        except Exception:  # whatever the cluster's client raises means that it cannot say
            if not self._troubled:
                _log.exception("the cluster does not report which nodes it drains")
            self._troubled = True
            return
        self._troubled = False
        if found.items() - self._told.items():
            self._told.update(found)
            self._tell(NodesDraining(dict(self._told)))
