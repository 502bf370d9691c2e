"""Builds the batches of the next steps in a thread of its own, so that training does not wait.

What a step reads is a pure function of its window, so a batch that was built ahead is the one that
would be built at its step, and one that is not needed is dropped. An error belongs to the step
whose batch it concerns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

AHEAD = 2
"""Batches that are kept for later windows."""
Batch = TypeVar("Batch")


class BatchesAhead(Generic[Batch]):
    """The batches of the windows that are read one after another. For one thread.

    Its own thread starts with the first batch: a process that has not trained yet may be forked.
    """

    def __init__(self, build: Callable[[int], Batch]) -> None:
        """`build(window)`: called in the thread, for one window at a time."""
        self._build = build
        self._thread = ThreadPoolExecutor(1, "batches")
        self._ordered: dict[int, Future[Batch]] = {}

    def get(self, window: int, later: Sequence[int]) -> Future[Batch]:
        """The batch of a window, which may still be being built. Then the first `AHEAD` of the
        windows `later` are built."""
        wanted = [window, *later[:AHEAD]]
        for dropped in self._ordered.keys() - set(wanted):
            self._ordered.pop(dropped).cancel()
        for each in wanted:
            if each not in self._ordered:
                self._ordered[each] = self._thread.submit(self._build, each)
        return self._ordered.pop(window)

    def close(self) -> None:
        """Drop what was built ahead; the thread ends after what it is building."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._ordered.clear()
