"""A node's work at the storage beside its saves: loads for its ranks, and clean-ups of the remote
tier. A process of its own carries out each.

A clean-up may read a whole checkpoint, so its deadline is much longer than that of a publication.
One runs at a time; of the requests that arrive meanwhile only the newest is carried out: it
includes all the others.
"""

from __future__ import annotations

import threading
from dataclasses import replace

import structlog

from holdfast_workers.agent.agent_config import AgentConfig
from holdfast_workers.agent.signal_sender import SignalSender
from holdfast_workers.agent.worker_pool import Slot
from holdfast_workers.errors import WorkersError
from holdfast_workers.ipc import control_channel
from holdfast_workers.ipc.children import ChildProcesses
from holdfast_workers.ipc.io_loop import NodeIO
from holdfast_workers.protocol.processes import (
    LoadOrder,
    LoadOutcome,
    LoadResult,
    StorageRefusal,
    TidierJob,
)
from holdfast_workers.protocol.signals import RetentionDone

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
        slot.child.send(replace(outcome, number=order.number))


class RemoteCleanup:
    """Thread-safe. A thread waits for the tidiers while there are any."""

    def __init__(
        self,
        config: AgentConfig,
        child_processes: ChildProcesses,
        io: NodeIO,
        signals: SignalSender,
        closing: threading.Event,
    ) -> None:
        self._timeout_s = config.tidy_timeout_s
        self._child_processes = child_processes
        self._io = io
        self._signals = signals
        self._closing = closing
        self._lock = threading.Lock()
        self._requested: TidierJob | None = None
        self._runs = False

    def request(self, job: TidierJob) -> None:
        """Clean up as soon as the running tidier has ended; a signal reports the result."""
        with self._lock:
            self._requested = job
            if not self._runs:
                self._runs = True
                threading.Thread(target=self._run, name="tidier", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._lock:
                job, self._requested = self._requested, None
                if job is None or self._closing.is_set():
                    self._runs = False
                    return
            self._signals.send(self._tidy(job), job.command.attempt)

    def _tidy(self, job: TidierJob) -> RetentionDone:
        """Run a tidier to its end; returns its result, or why there is none."""
        try:
            child = self._child_processes.fork(f"tidier-{job.command.step}", job)
            answer: RetentionDone | StorageRefusal = self._io.await_answer(child, self._timeout_s)
            if isinstance(answer, RetentionDone):
                return answer
            message = answer.message
        except TimeoutError:
            message = f"not finished within {self._timeout_s:g} s"
        except (WorkersError, OSError) as error:
            _log.exception("the cleanup of the remote tier failed")
            message = control_channel.shorten_middle(str(error))
        return RetentionDone(job.command.step, message=message)
