"""A node agent's threads beside its commands: for periodic calls, and for slow work that must not
make commands wait."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import structlog

_log = structlog.get_logger()


def _nothing() -> None:
    pass


class PeriodicThread:
    """Calls `call` in a thread of its own: at once, and again `period_s` after it has returned or
    raised, or earlier: after the seconds that it returns. An exception is logged, and ends only
    that call. After the last call, the same thread calls `on_end`."""

    def __init__(
        self,
        name: str,
        period_s: float,
        call: Callable[[], float | None],
        on_end: Callable[[], None] = _nothing,
    ) -> None:
        self._period_s = period_s
        self._call = call
        self._on_end = on_end
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, within_s: float) -> None:
        """Begin no further call, and wait up to `within_s` for the present one. A call that takes
        longer is left running: its thread ends with the process."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(within_s)

    def _run(self) -> None:
        while not self._closing.is_set():
            pause_s = None
            try:
                pause_s = self._call()
            except Exception:
                _log.exception("a periodic call failed", thread=self._thread.name)
            self._closing.wait(self._period_s if pause_s is None else min(pause_s, self._period_s))
        self._on_end()


class BackgroundTasks:
    """An exception of a task is logged and passed to `on_failure`. Once `closing` is set, no task
    begins, and exceptions of running tasks are ignored: the agent is ending."""

    def __init__(
        self, threads: int, on_failure: Callable[[Exception], None], closing: threading.Event
    ) -> None:
        self._pool = ThreadPoolExecutor(threads, "node-background")
        self._on_failure = on_failure
        self._closing = closing

    def run(self, body: Callable[..., None], *arguments: Any) -> None:
        if not self._closing.is_set():
            with contextlib.suppress(RuntimeError):  # the pool was just shut down: the agent ends
                self._pool.submit(self._run, body, arguments)

    def stop(self) -> None:
        """Cancel the waiting tasks; does not wait for the running ones."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _run(self, body: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        try:
            body(*arguments)
        except Exception as error:
            if not self._closing.is_set():
                _log.exception("a background task failed", task=getattr(body, "__name__", ""))
                self._on_failure(error)
