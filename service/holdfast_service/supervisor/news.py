"""Lets the reconciler wait for news of a supervisor, instead of polling often.

News are events, and the first step of an attempt. Further steps are no news: the next poll fetches
them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class News:
    """Thread-safe. Only the newest waiter waits: an earlier one belongs to a reconciler that has
    lost the job, or has ended."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiter = 0

    def tell(self) -> None:
        """There may be news."""
        with self._changed:
            self._changed.notify_all()

    def wait(self, is_there: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until `is_there()`; False after the timeout, or for an earlier waiter."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._waiter += 1
            own = self._waiter
            self._changed.notify_all()
            while own == self._waiter and (left := deadline - time.monotonic()) > 0:
                if is_there():
                    return True
                self._changed.wait(left)
        return False
