"""The node agent's I/O thread: one selector over all its children.

It reads their control sockets and logs, and sees their exits through pidfds the moment the
kernel does. It hands everything to the agent and never waits for anything else. It outlives every
error: a child whose message cannot be taken in is killed, with the reason in its log.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from holdfast_workers.ipc import control_channel
from holdfast_workers.ipc.children import Child

READ_BYTES = 64 * 1024
LINE_LIMIT = 8 * 1024
STOP_S = 5.0


class Observer(Protocol):
    """Whom the I/O thread tells."""

    def worker_said(self, name: str, message: dict[str, Any]) -> None: ...
    def child_said(self, child: Child, message: dict[str, Any]) -> None: ...
    def child_logged(self, child: Child, text: str) -> None: ...
    def child_exited(self, child: Child, detail: dict[str, int | str]) -> None: ...
    def zygote_exited(self) -> None: ...


class NodeIO:
    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._arrivals: list[Callable[[], None]] = []
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_reader, False)
        os.set_blocking(self._wake_writer, False)
        self._partial: dict[int, bytes] = {}
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="node-io", daemon=True)

    def start(self) -> None:
        self._selector.register(self._wake_reader, selectors.EVENT_READ, self._drain_wakes)
        self._thread.start()

    def stop(self) -> None:
        self._stopped = True
        self._wake()
        if self._thread.is_alive():
            self._thread.join(STOP_S)

    def watch(self, child: Child) -> None:
        """Follow a child to its end. What a template says is for who asked it."""
        self._soon(lambda: self._register(child))

    def watch_zygote(self, pid: int | None) -> None:
        if pid is not None:
            self._soon(lambda: self._register_zygote(pid))

    def run_to_end(self, child: Child, timeout_s: float) -> dict[str, Any]:
        """Wait for a child's one answer. Raises TimeoutError, or ChildProcessError with its log."""
        child.end.settimeout(timeout_s)
        try:
            return control_channel.receive(child.end)
        except control_channel.ControlClosed as error:
            log = os.read(child.log_fd, READ_BYTES).decode(errors="replace")
            raise ChildProcessError(f"{child.name} failed: {log[-2000:]}") from error
        except TimeoutError:
            child.kill()
            raise
        finally:
            child.end.settimeout(None)
            self.watch(child)  # to reap it

    def _run(self) -> None:
        while not self._stopped:
            for key, _events in self._selector.select():
                current = self._selector.get_map().get(key.fd)
                if current is not None and current.data is key.data:  # not closed meanwhile
                    key.data()

    def _soon(self, action: Callable[[], None]) -> None:
        with self._lock:
            self._arrivals.append(action)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: it will wake as it is
            os.write(self._wake_writer, b"!")

    def _drain_wakes(self) -> None:
        os.read(self._wake_reader, READ_BYTES)
        with self._lock:
            actions, self._arrivals = self._arrivals, []
        for action in actions:
            action()

    def _register(self, child: Child) -> None:
        sources: list[tuple[Any, Callable[[Child], object]]] = [
            (child.log_fd, self._read_log),
            (child.pidfd, self._exited),
        ]
        if child.kind != "template":
            sources.insert(0, (child.end, self._read_message))
        for source, action in sources:
            self._selector.register(
                source, selectors.EVENT_READ, partial(self._guarded, child, action)
            )

    def _guarded(self, child: Child, action: Callable[[Child], object]) -> None:
        """Attend to a child. Whatever goes wrong ends that child, not the thread."""
        try:
            action(child)
        except Exception as error:
            traceback.print_exc()
            child.kill()
            why = f"killed by its node agent: {type(error).__name__}: {error}"
            with contextlib.suppress(Exception):  # the log may be what failed; it is printed above
                self._observer.child_logged(child, why)

    def _register_zygote(self, pid: int) -> None:
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._observer.zygote_exited()
            return

        def gone() -> None:
            self._selector.unregister(pidfd)
            os.close(pidfd)
            self._observer.zygote_exited()

        self._selector.register(pidfd, selectors.EVENT_READ, gone)

    def _read_message(self, child: Child) -> bool:
        """Hand on one message. False at the end of the socket."""
        try:
            message = control_channel.receive(child.end)
        except control_channel.ControlClosed:
            self._selector.unregister(child.end)
            return False
        if child.kind == "worker":
            self._observer.worker_said(child.name, message)
        else:
            self._observer.child_said(child, message)
        return True

    def _read_log(self, child: Child) -> bool:
        """Hand on what was printed, line by line. False at the end of the pipe."""
        try:
            raw = os.read(child.log_fd, READ_BYTES)
        except BlockingIOError:
            return False
        if not raw:
            self._selector.unregister(child.log_fd)
            return False
        *lines, rest = (self._partial.pop(child.log_fd, b"") + raw).split(b"\n")
        if len(rest) > LINE_LIMIT:
            lines, rest = [*lines, rest], b""
        self._partial[child.log_fd] = rest
        for line in lines:
            self._observer.child_logged(child, line.decode(errors="replace"))
        return True

    def _exited(self, child: Child) -> None:
        """The process is gone: read what it left behind, then say so."""
        self._selector.unregister(child.pidfd)
        child.end.setblocking(False)
        self._guarded(child, self._read_rest)
        for descriptor in (child.end, child.log_fd):
            if descriptor in self._watched():
                self._selector.unregister(descriptor)
        detail = child.reap()
        child.close()
        self._observer.child_exited(child, detail)

    def _read_rest(self, child: Child) -> None:
        while self._message_left(child):
            pass
        while child.log_fd in self._watched() and self._read_log(child):
            pass
        rest = self._partial.pop(child.log_fd, b"")
        if rest:
            self._observer.child_logged(child, rest.decode(errors="replace"))

    def _message_left(self, child: Child) -> bool:
        try:
            return child.end in self._watched() and self._read_message(child)
        except BlockingIOError:
            return False

    def _watched(self) -> list[Any]:
        return [key.fileobj for key in self._selector.get_map().values()]
