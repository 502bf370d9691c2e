"""Reads the batches of the next step while a step computes.

Each step is read by a thread of its own, which ends with it, and begins after the thread before has
ended. So one thread at a time reads the data, and none is left when nothing is read. What is read
is a pure function of its *share*: batches that were read ahead for another one are dropped, and
read anew. The thread of a dropped reading ends before its next batch, also while it waits for data.

The training thread takes the batches in their order. Its wait for one is no hang, whether the data
or the processor is slow: a longer one is the phase `data`, with a bound of its own.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from holdfast_workers.data.token_corpus import PATIENCE_S
from holdfast_workers.progress import beacon

_SHORT_S = 0.2
"""A longer wait is a phase of its own. Below every limit that is learned for a phase by default."""
_BOUND_S = 2 * PATIENCE_S
"""Of a wait without a sign of the reading thread: longer than it waits for a file."""
_POLL_S = 0.1
_THREAD_NAME = "batches-ahead"

Share = TypeVar("Share")
Batch = TypeVar("Batch")


class BatchesAhead(Generic[Share, Batch]):
    """The readings of one training thread, which makes all calls."""

    def __init__(self, read: Callable[[Share], Iterator[Batch]]) -> None:
        """`read` is called by the training thread; what it returns is iterated by another one."""
        self._read = read
        self._current: _Reading[Share, Batch] | None = None
        self._ahead: _Reading[Share, Batch] | None = None
        self._last: threading.Thread | None = None

    def begin(self, share: Share) -> None:
        """Take the batches of this share from now on, from its first: those that were read ahead,
        if they are of an equal share."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead.share != share:
            _drop(ahead)
            ahead = self._start(share)
        _drop(self._current)
        self._current = ahead

    def read_ahead(self, share: Share) -> None:
        """Read this share, once the current one is read."""
        _drop(self._ahead)
        self._ahead = self._start(share)

    def take(self, check: Callable[[], None]) -> Batch:
        """The next batch of the current share. Raises what its reading raised; what `check` raises,
        which is called again and again while it waits."""
        if self._current is None:
            raise RuntimeError("no share has been begun")
        return self._current.take(check)

    @property
    def waited_s(self) -> float:
        """The time for which `take` waited for batches of the current share."""
        return 0.0 if self._current is None else self._current.waited_s

    @property
    def fetch_waited_s(self) -> float:
        """The part of it in which the reading itself waited for data, see `wait_for_data`."""
        return 0.0 if self._current is None else self._current.fetch_waited_s

    def drop(self) -> None:
        """Discard all batches. Threads that read some end soon; nothing waits for them here."""
        _drop(self._current)
        _drop(self._ahead)
        self._current = self._ahead = None

    def _start(self, share: Share) -> _Reading[Share, Batch]:
        reading = _Reading(share, self._read(share), self._last)
        self._last = reading
        reading.start()
        return reading


@contextmanager
def wait_for_data(otherwise: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Inside, a reading waits for data that is not there; entered again if the end of the wait
    moves. Yields a check that raises once the reading is dropped; `otherwise` in a thread of which
    none is."""
    thread = threading.current_thread()
    if not isinstance(thread, _Reading):
        yield otherwise
        return
    thread.show_life(lacks_data=True)
    try:
        yield thread.check
    finally:
        thread.show_life()


class _ReadingDropped(Exception):
    """Ends a reading whose batches nothing will take."""


class _Reading(threading.Thread, Generic[Share, Batch]):
    """The reading of one share."""

    def __init__(
        self, share: Share, batches: Iterator[Batch], before: threading.Thread | None
    ) -> None:
        super().__init__(name=_THREAD_NAME, daemon=True)
        self.share = share
        self._batches = batches
        self._before = before
        self._changed = threading.Condition()
        self._read: deque[Batch] = deque()
        self._signs = 0
        """Signs of life: batches, begin and end of waits for data, and the end."""
        self._lacks_data = False
        self.waited_s = self.fetch_waited_s = 0.0
        self._error: BaseException | None = None
        self._over = False
        self._dropped = False

    # --- in the reading thread --------------------------------------------------------------

    def run(self) -> None:
        try:
            if self._before is not None:
                self._before.join()
                self._before = None
            self.check()
            for batch in self._batches:
                self._read.append(batch)
                self.show_life()
                self.check()
        except BaseException as error:
            self._error = error  # raised in the thread that takes the batches
        with self._changed:
            self._over = True
        self.show_life()

    def check(self) -> None:
        if self._dropped:
            raise _ReadingDropped

    def show_life(self, *, lacks_data: bool = False) -> None:
        with self._changed:
            self._lacks_data = lacks_data
            self._signs += 1
            self._changed.notify()

    # --- in the training thread -------------------------------------------------------------

    def take(self, check: Callable[[], None]) -> Batch:
        began = time.perf_counter()
        batch = self._awaited(check)
        self.waited_s += time.perf_counter() - began
        return batch

    def drop(self) -> None:
        self._dropped = True
        self._read.clear()

    def _awaited(self, check: Callable[[], None]) -> Batch:
        while True:
            with self._changed:
                signs, over = self._signs, self._over
                if self._read:
                    return self._read.popleft()
            if over:
                raise self._error or RuntimeError("the share has no more batches")
            if not self._shows_life(signs, _SHORT_S):
                check()
                with beacon.phase("data", bound_s=_BOUND_S):
                    while not self._shows_life(signs, _POLL_S):
                        check()

    def _shows_life(self, after: int, timeout_s: float) -> bool:
        """Whether the reading thread has shown life, within this time. A wait of its own for data
        begins and ends with a sign, so all of this time is a part of it, or none."""
        with self._changed:
            began, lacks_data = time.perf_counter(), self._lacks_data
            shown = self._changed.wait_for(lambda: self._signs != after, timeout_s)
        if lacks_data:
            self.fetch_waited_s += time.perf_counter() - began
        return shown


def _drop(reading: _Reading[Share, Batch] | None) -> None:
    if reading is not None:
        reading.drop()
