"""Reads the batches of the next step while a step computes.

One thread at a time reads the data, a step after the other, and ends when it gets none for a while.
It is not started anew for each step: the start of a thread returns only once the thread runs. What
is read is a pure function of its *share*: batches that were read ahead for another one are dropped,
and read anew. A reading that is dropped ends before its next batch, also while it waits for data.

The training thread takes the batches in their order. Its wait for one is no hang, whether the data
or the processor is slow: a longer one is the phase `data`, with a bound of its own.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from holdfast_workers.data.token_corpus import PATIENCE_S
from holdfast_workers.progress import beacon
from holdfast_workers.protocol.messages import DATA_PHASE

_SHORT_S = 0.2
"""A longer wait is a phase of its own. Below every limit that is learned for a phase by default."""
_BOUND_S = 2 * PATIENCE_S
"""Of a wait without a sign of the reading thread: longer than it waits for a file."""
_POLL_S = 0.1
_IDLE_S = 0.5
"""Time without a reading after which the thread ends: longer than it takes to start one, by far."""
_THREAD_NAME = "batches-ahead"

Share = TypeVar("Share")
Batch = TypeVar("Batch")


class BatchesAhead(Generic[Share, Batch]):
    """The readings of one training thread, which makes all calls."""

    def __init__(self, read: Callable[[Share], Iterator[Batch]]) -> None:
        """`read` is called by the training thread; what it returns is iterated by another one."""
        self._read = read
        self._current: _ShareReading[Share, Batch] | None = None
        self._ahead: _ShareReading[Share, Batch] | None = None
        self._reader: _ReadingThread | None = None

    def begin(self, share: Share) -> None:
        """Take the batches of this share from now on, from its first: those that were read ahead,
        if they are of an equal share. A reading ahead that has failed does not count: its waits had
        ends of their own, and nobody waited for it yet."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead.share != share or ahead.has_failed:
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
        """Discard all batches. A reading of some ends soon; nothing waits for it here."""
        _drop(self._current)
        _drop(self._ahead)
        self._current = self._ahead = None

    def _start(self, share: Share) -> _ShareReading[Share, Batch]:
        reading = _ShareReading(share, self._read(share))
        if self._reader is None or not self._reader.take_on(reading):
            self._reader = _ReadingThread(reading)
            self._reader.start()
        return reading


@contextmanager
def wait_for_data(otherwise: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Inside, a reading waits for data that is not there; entered again if the end of the wait
    moves. Yields a check that raises once the reading is dropped; `otherwise` in a thread of which
    none is."""
    thread = threading.current_thread()
    reading = thread.reading if isinstance(thread, _ReadingThread) else None
    if reading is None:
        yield otherwise
        return
    reading.show_life(lacks_data=True)
    try:
        yield reading.check
    finally:
        reading.show_life()


class _ReadingDropped(Exception):
    """Ends a reading whose batches nothing will take."""


class _ReadingThread(threading.Thread):
    """Carries out readings in their order, until it has been idle."""

    def __init__(self, first: _ShareReading[Any, Any]) -> None:
        super().__init__(name=_THREAD_NAME, daemon=True)
        self.reading: _ShareReading[Any, Any] | None = None
        """The present one."""
        self._changed = threading.Condition()
        self._waiting = deque([first])
        self._over = False

    def take_on(self, reading: _ShareReading[Any, Any]) -> bool:
        """False: the thread ends, and has carried out all that it took on."""
        with self._changed:
            if not self._over:
                self._waiting.append(reading)
                self._changed.notify()
            return not self._over

    def run(self) -> None:
        while self._next():
            assert self.reading is not None
            self.reading.run()
            self.reading = None

    def _next(self) -> bool:
        with self._changed:
            self._over = not self._changed.wait_for(lambda: self._waiting, _IDLE_S)
            if not self._over:
                self.reading = self._waiting.popleft()
            return not self._over


class _ShareReading(Generic[Share, Batch]):
    """The reading of one share."""

    def __init__(self, share: Share, batches: Iterator[Batch]) -> None:
        self.share = share
        self._batches = batches
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

    @property
    def has_failed(self) -> bool:
        with self._changed:
            return self._over and self._error is not None

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
                with beacon.phase(DATA_PHASE, bound_s=_BOUND_S):
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


def _drop(reading: _ShareReading[Share, Batch] | None) -> None:
    if reading is not None:
        reading.drop()
