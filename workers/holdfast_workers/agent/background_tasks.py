"""What a node agent has to do that is slow, in threads where nobody waits for it."""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class Errands:
    """What an errand raises is printed and given to `on_failure`; once `closing` is set none is
    begun, and what those under way raise is nobody's concern."""

    def __init__(
        self, threads: int, on_failure: Callable[[Exception], None], closing: threading.Event
    ) -> None:
        self._pool = ThreadPoolExecutor(threads, "node-errand")
        self._on_failure = on_failure
        self._closing = closing

    def run(self, body: Callable[..., None], *arguments: Any) -> None:
        if not self._closing.is_set():
            with contextlib.suppress(RuntimeError):  # the pool was shut just now: we end
                self._pool.submit(self._run, body, arguments)

    def stop(self) -> None:
        """Waits for none."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _run(self, body: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        try:
            body(*arguments)
        except Exception as error:
            if not self._closing.is_set():
                traceback.print_exc()
                self._on_failure(error)
