"""Runs the slow work of a node agent in threads of its own, so that its commands never wait."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import structlog

_log = structlog.get_logger()


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
