"""Calls a function periodically in a thread of its own; an exception ends only that call."""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog

_log = structlog.get_logger()


def _nothing() -> None:
    pass


class PeriodicThread:
    """Calls `call` at once, and again `period_s` after it has returned or raised, or earlier: after
    the seconds that it returns. An exception is logged. After the last call, the same thread calls
    `on_end`."""

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
