"""A small pool of threads for calls that may block without limit: in a file system, or in Ray.

Each kind of call has a pool of its own, so that those that hang delay no others. The end of the
process waits for none of them; the executors of `concurrent.futures` and of asyncio do.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

Params = ParamSpec("Params")
Result = TypeVar("Result")

_Call = tuple["Future[Any]", Callable[[], Any]]
_Calls = SimpleQueue[_Call | None]


class DaemonThreads(Executor):
    """Runs at most `limit` calls at the same time, and further ones in their order. Its threads
    end after the pool itself is dropped."""

    def __init__(self, limit: int, name: str) -> None:
        self._limit = limit
        self._name = name
        self._started = 0
        self._starting = threading.Lock()
        self._calls: _Calls = SimpleQueue()
        self._idle = threading.Semaphore(0)
        weakref.finalize(self, self._calls.put, None).atexit = False

    def submit(
        self, call: Callable[Params, Result], /, *args: Params.args, **kwargs: Params.kwargs
    ) -> Future[Result]:
        future: Future[Result] = Future()
        self._calls.put((future, partial(call, *args, **kwargs)))
        with self._starting:
            if not self._idle.acquire(blocking=False) and self._started < self._limit:
                self._started += 1
                arguments = (self._calls, self._idle)
                threading.Thread(target=_run, args=arguments, name=self._name, daemon=True).start()
        return future


def _run(calls: _Calls, idle: threading.Semaphore) -> None:
    """Makes calls until the pool is dropped. Keeps no reference to the pool."""
    while (item := calls.get()) is not None:
        _make(*item)
        del item
        idle.release()
    calls.put(None)  # for the next thread


def _make(future: Future[Any], call: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return  # its caller no longer waits
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)
