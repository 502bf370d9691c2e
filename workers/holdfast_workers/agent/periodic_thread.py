"""A thread that does the same thing again and again, whatever fails in one of its turns."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable


def _nothing() -> None:
    pass


class Turns:
    """`turn` is called at once, and again `period_s` after it has returned or raised; `at_end` by
    the same thread, after the last. What a turn raises is printed, and costs that turn alone."""

    def __init__(
        self,
        name: str,
        period_s: float,
        turn: Callable[[], None],
        at_end: Callable[[], None] = _nothing,
    ) -> None:
        self._period_s = period_s
        self._turn = turn
        self._at_end = at_end
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, within_s: float) -> None:
        """Begin no further turn. One that does not return in time is left behind: it ends with
        the process."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(within_s)

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self._turn()
            except Exception:
                traceback.print_exc()
            self._closing.wait(self._period_s)
        self._at_end()
