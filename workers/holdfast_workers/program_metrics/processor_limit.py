"""Ends a computation of this process that takes too long, such as the search of a line.

A regular expression can take hours, and the standard library has no limit for it; but it lets
signals through. Works in the main thread only; in others there is no limit.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

Result = TypeVar("Result")


class TookTooLong(Exception):
    """The computation was ended."""


def call(compute: Callable[[], Result], limit_s: float) -> Result:
    """The result of `compute`, which has no effects and may take `limit_s` of the processor.
    Raises TookTooLong."""
    if threading.current_thread() is not threading.main_thread():
        return compute()
    is_computing = True

    def end(_number: int, _frame: FrameType | None) -> None:
        if is_computing:
            raise TookTooLong(f"it took more than {limit_s:g} s of the processor")

    before = signal.signal(signal.SIGVTALRM, end)
    try:
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, limit_s)
            return compute()
        finally:
            is_computing = False
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
    finally:
        signal.signal(signal.SIGVTALRM, before)
