"""The node agent's I/O thread: one selector over all its children.

It reads the control sockets and logs of the children and sees each exit through a pidfd at once. It
passes everything to the agent and never waits for anything else. No error ends this thread: a child
whose message cannot be processed is killed, and the reason is written to its log.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import structlog

from holdfast_workers.ipc import control_channel
from holdfast_workers.ipc.children import Child
from holdfast_workers.ipc.line_budget import LeftOut
from holdfast_workers.ipc.linux_processes import ProcessEnd
from holdfast_workers.ipc.output_lines import LogLines
from holdfast_workers.protocol.processes import TemplateJob, WorkerJob, WorkerMessage, WorkerSignal

READ_BYTES = 64 * 1024
PIPE_READS = 2
"""The number of reads that find all that a pipe holds."""
STOP_S = 5.0
LOOK_S = 1.0
"""Time between two looks at lines that wait for their place in the log."""
_log = structlog.get_logger()


class ChildObserver(Protocol):
    """Receives what the I/O thread reads; called in that thread."""

    def on_worker_message(self, name: str, message: WorkerMessage) -> None: ...
    def on_child_message(self, child: Child, message: object) -> None: ...
    def on_child_log(self, child: Child, text: str | LeftOut) -> None: ...
    def on_child_exit(self, child: Child, end: ProcessEnd) -> None: ...
    def on_zygote_exit(self) -> None: ...


class NodeIO:
    """The thread and its selector. All methods may be called from any thread."""

    def __init__(self, observer: ChildObserver) -> None:
        self._observer = observer
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._scheduled: list[Callable[[], None]] = []
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_reader, False)
        os.set_blocking(self._wake_writer, False)
        self._logs: dict[int, tuple[Child, LogLines]] = {}  # by process id
        self._watched: set[int] = set()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="node-io", daemon=True)

    def start(self) -> None:
        self._selector.register(self._wake_reader, selectors.EVENT_READ, self._run_scheduled)
        self._thread.start()

    def stop(self) -> None:
        self._stopped = True
        self._wake()
        if self._thread.is_alive():
            self._thread.join(STOP_S)

    def watch(self, child: Child) -> None:
        """Watch a child until it exits. The control socket of a template is not read here: its
        answers belong to the caller of `fork_from`."""
        self._watched.add(child.pid)
        self._schedule(lambda: self._register(child))

    def watches(self, pid: int) -> bool:
        """Whether this child is watched, and will be reaped at its exit."""
        return pid in self._watched

    def watch_zygote(self, pid: int | None) -> None:
        if pid is not None:
            self._schedule(lambda: self._register_zygote(pid))

    def await_answer(self, child: Child, timeout_s: float) -> Any:
        """Wait for the only message of a child, one of its job's answers, and watch it until it
        exits.

        Raises TimeoutError (the child is killed), ChildProcessError with the end of its log, or
        UnreadableDocument."""
        child.end.settimeout(timeout_s)
        try:
            return control_channel.receive(child.end, *child.job.answers)
        except control_channel.ControlClosed as error:
            raw = b""
            with contextlib.suppress(BlockingIOError):
                raw = os.read(child.log_fd, READ_BYTES)
            self._schedule(lambda: self._take_output(child, raw))
            log = raw.decode(errors="replace")
            raise ChildProcessError(f"{child.name} failed: {log[-2000:]}") from error
        except TimeoutError:
            child.kill()
            raise
        finally:
            child.end.settimeout(None)
            self.watch(child)  # to reap it

    def _run(self) -> None:
        look_at = 0.0
        while not self._stopped:
            waits = any(log.waits for _, log in self._logs.values())
            for key, _events in self._selector.select(LOOK_S if waits else None):
                current = self._selector.get_map().get(key.fd)
                if current is not None and current.data is key.data:  # still open
                    key.data()
            if waits and time.monotonic() >= look_at:
                look_at = time.monotonic() + LOOK_S
                for child, _ in tuple(self._logs.values()):
                    self._guarded(child, self._look_at_log)

    def _schedule(self, action: Callable[[], None]) -> None:
        with self._lock:
            self._scheduled.append(action)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes the thread anyway
            os.write(self._wake_writer, b"!")

    def _run_scheduled(self) -> None:
        os.read(self._wake_reader, READ_BYTES)
        with self._lock:
            actions, self._scheduled = self._scheduled, []
        for action in actions:
            action()

    def _register(self, child: Child) -> None:
        sources: list[tuple[Any, Callable[[Child], object]]] = [
            (child.log_fd, self._read_log),
            (child.pidfd, self._exited),
        ]
        if not isinstance(child.job, TemplateJob):
            sources.insert(0, (child.end, self._read_message))
        for source, action in sources:
            self._selector.register(
                source, selectors.EVENT_READ, partial(self._guarded, child, action)
            )

    def _guarded(self, child: Child, action: Callable[[Child], object]) -> None:
        """Run `action` on a child. An exception kills that child and not the thread."""
        try:
            action(child)
        except Exception as error:
            _log.exception("cannot handle a child's message or output", child=child.name)
            child.kill()
            reason = f"killed by its node agent: {type(error).__name__}: {error}"
            with contextlib.suppress(Exception):  # the log may be what failed; it is printed above
                self._observer.on_child_log(child, reason)

    def _register_zygote(self, pid: int) -> None:
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._observer.on_zygote_exit()
            return

        def report_exit() -> None:
            self._selector.unregister(pidfd)
            os.close(pidfd)
            self._observer.on_zygote_exit()

        self._selector.register(pidfd, selectors.EVENT_READ, report_exit)

    def _read_message(self, child: Child) -> bool:
        """Pass on one message. False at end-of-file."""
        try:
            message: Any = control_channel.receive(child.end, *child.job.answers)
        except control_channel.ControlClosed:
            self._selector.unregister(child.end)
            return False
        if isinstance(message, WorkerSignal):  # such as its end: what it has printed comes first
            self._read_printed(child)
        if isinstance(child.job, WorkerJob):
            self._observer.on_worker_message(child.name, message)
        else:
            self._observer.on_child_message(child, message)
        return True

    def _read_log(self, child: Child) -> bool:
        """Pass on the output, line by line. False at end-of-file, or if there is none now."""
        try:
            raw = os.read(child.log_fd, READ_BYTES)
        except BlockingIOError:
            return False
        if not raw:
            self._selector.unregister(child.log_fd)
            return False
        self._take_output(child, raw)
        return True

    def _read_printed(self, child: Child) -> None:
        """Pass on all lines that the child has printed until now."""
        for _ in range(PIPE_READS):
            if child.log_fd not in self._registered() or not self._read_log(child):
                break
        if child.pid in self._logs:
            self._pass_on(child, self._logs[child.pid][1].release(time.monotonic()))

    def _take_output(self, child: Child, raw: bytes) -> None:
        _, log = self._logs.setdefault(child.pid, (child, LogLines()))
        self._pass_on(child, log.feed(raw, time.monotonic()))

    def _look_at_log(self, child: Child) -> None:
        if child.pid in self._logs:
            self._pass_on(child, self._logs[child.pid][1].look(time.monotonic()))

    def _pass_on(self, child: Child, kept: list[str | LeftOut]) -> None:
        for text in kept:
            self._observer.on_child_log(child, text)

    def _exited(self, child: Child) -> None:
        """The process has ended: read its remaining messages and output, then report the exit."""
        self._selector.unregister(child.pidfd)
        child.end.setblocking(False)
        last = (self._read_last_messages, self._read_last_output, self._end_log)
        for part in (Child.end_session, *last):  # what it has started prints nothing after them
            self._guarded(child, part)
        for descriptor in (child.end, child.log_fd):
            if descriptor in self._registered():
                self._selector.unregister(descriptor)
        end = child.reap()
        self._watched.discard(child.pid)
        child.close()
        self._observer.on_child_exit(child, end)

    def _read_last_messages(self, child: Child) -> None:
        while self._read_next_message(child):
            pass

    def _read_last_output(self, child: Child) -> None:
        while child.log_fd in self._registered() and self._read_log(child):
            pass

    def _end_log(self, child: Child) -> None:
        _, log = self._logs.pop(child.pid, (child, LogLines()))
        self._pass_on(child, log.end(time.monotonic()))

    def _read_next_message(self, child: Child) -> bool:
        try:
            return child.end in self._registered() and self._read_message(child)
        except BlockingIOError:
            return False

    def _registered(self) -> list[Any]:
        return [key.fileobj for key in self._selector.get_map().values()]
