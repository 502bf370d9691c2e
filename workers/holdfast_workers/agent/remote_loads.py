"""A node's loads from a bucket, for its ranks: a process without users' code carries out each."""

from __future__ import annotations

import structlog

from holdfast_workers.agent.agent_config import AgentConfig
from holdfast_workers.agent.worker_pool import Slot
from holdfast_workers.errors import WorkersError
from holdfast_workers.ipc import control_channel
from holdfast_workers.ipc.children import ChildProcesses
from holdfast_workers.ipc.io_loop import NodeIO
from holdfast_workers.protocol.processes import LoadOrder, LoadOutcome, LoadResult

_log = structlog.get_logger()


class RemoteLoads:
    """Called in background threads: a load takes as long as its bytes."""

    def __init__(self, config: AgentConfig, child_processes: ChildProcesses, io: NodeIO) -> None:
        self._timeout_s = config.plan.load_timeout_s
        self._child_processes = child_processes
        self._io = io

    def load(self, slot: Slot, order: LoadOrder) -> None:
        """Have a rank's order carried out, and send the rank its outcome."""
        try:
            child = self._child_processes.fork(f"loader-{order.rank}", order)
            outcome: LoadOutcome = self._io.await_answer(child, self._timeout_s)
        except (WorkersError, OSError) as error:  # the rank reports it as a failed restore
            _log.exception("a load from the bucket failed", rank=order.rank)
            reason = control_channel.shorten_middle(f"{type(error).__name__}: {error}")
            outcome = LoadOutcome(order.attempt, LoadResult.FAILED, reason=reason)
        slot.child.send(outcome)
