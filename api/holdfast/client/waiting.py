"""Waiting, for threads; `async_waiting.py` has the same functions for event loops."""

from collections.abc import Callable
from time import sleep
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

__all__ = ["off_loop", "sleep"]


def off_loop(function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Call a function that blocks. A thread may block, so it runs here; in an event loop, the same
    call runs it in another thread."""
    return function(*arguments, **named)
