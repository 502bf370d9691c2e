"""A node's part in cleaning up the remote tier: one `tidier` process at a time, in the background.

A tidier may read a whole checkpoint, so its deadline is much longer than that of a publication. Of
the requests that arrive meanwhile only the newest is carried out: it includes all the others.
"""

from __future__ import annotations

import threading

import structlog

from holdfast_workers.agent.agent_config import AgentConfig
from holdfast_workers.agent.signal_sender import SignalSender
from holdfast_workers.errors import WorkersError
from holdfast_workers.ipc import control_channel
from holdfast_workers.ipc.children import ChildProcesses
from holdfast_workers.ipc.io_loop import NodeIO
from holdfast_workers.protocol.processes import StorageRefusal, TidierJob
from holdfast_workers.protocol.signals import RetentionDone

_log = structlog.get_logger()


class RemoteCleanup:
    """Thread-safe. A thread of its own waits for the tidiers."""

    def __init__(
        self, config: AgentConfig, child_processes: ChildProcesses, signals: SignalSender
    ) -> None:
        self._config = config
        self._child_processes = child_processes
        self._signals = signals
        self._io: NodeIO | None = None
        self._changed = threading.Condition()
        self._requested: TidierJob | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="tidier", daemon=True)

    def start(self, io: NodeIO) -> None:
        self._io = io
        self._thread.start()

    def stop(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def request(self, job: TidierJob) -> None:
        """Clean up as soon as the running tidier has ended; a signal reports the result."""
        with self._changed:
            self._requested = job
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._requested is not None)
                if self._closing:
                    return
                job, self._requested = self._requested, None
            assert job is not None
            self._signals.send(self._tidy(job), job.command.attempt)

    def _tidy(self, job: TidierJob) -> RetentionDone:
        """Run a tidier to its end; returns its result, or why there is none."""
        assert self._io is not None
        try:
            child = self._child_processes.fork(f"tidier-{job.command.step}", job)
            answer: RetentionDone | StorageRefusal = self._io.await_answer(
                child, self._config.tidy_timeout_s
            )
            if isinstance(answer, RetentionDone):
                return answer
            message = answer.message
        except TimeoutError:
            message = f"not finished within {self._config.tidy_timeout_s:g} s"
        except (WorkersError, OSError) as error:
            _log.exception("the cleanup of the remote tier failed")
            message = control_channel.shorten_middle(str(error))
        return RetentionDone(job.command.step, message=message)
