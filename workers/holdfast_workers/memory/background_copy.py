"""Background copies of the training state, made by one thread beside the training thread.

The training thread starts a copy right after a step has been applied and continues. Before it
changes the state again, it waits until the copy has *captured* the state. Work of the copying
thread after that (a second copy for the remote tier) delays only the next copy.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from math import inf
from statistics import median

from holdfast_workers.state.digest import ShardDigest

CAPTURE_S = 300.0
STOP_S = 10.0
_RECENT_COUNT = 8

CopyJob = Callable[[Callable[[ShardDigest], None]], None]
"""Makes one copy. Calls its argument with the digest as soon as the live state is captured."""


class BackgroundCopies:
    """Runs copies one after the other, in the order of their start."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shadow-copy")
        self._captured: Future[ShardDigest] | None = None
        self._done: Future[None] | None = None
        self._failure: BaseException | None = None
        self.stopped = False
        """Copy jobs poll this flag and return early once it is set."""

    def start(self, job: CopyJob) -> Callable[[], ShardDigest]:
        """Start a copy. The returned function waits for its digest. Raises the exception of an
        earlier copy that failed."""
        self._raise_failure()
        captured: Future[ShardDigest] = Future()

        def run() -> None:
            try:
                job(captured.set_result)
            except BaseException as error:
                if error.__traceback__ is not None:  # its frames hold views of memory to be freed
                    traceback.clear_frames(error.__traceback__)
                self._failure = error
                if not captured.done():
                    captured.set_exception(error)

        self._captured = captured
        self._done = self._thread.submit(run)
        return lambda: captured.result(CAPTURE_S)

    def await_captured(self) -> None:
        """Wait until the live state may be changed. Raises the exception that prevented its
        capture."""
        if self._captured is not None:
            self._captured.result(CAPTURE_S)

    def finish(self) -> None:
        """Wait until the last copy is complete, and end the thread."""
        self.await_captured()
        if self._done is not None:
            self._done.result(CAPTURE_S)
        self._raise_failure()
        self._thread.shutdown(wait=False)

    def end(self, grace_s: float) -> None:
        """Give the running copy `grace_s` to complete; then stop it.

        After the return nothing reads the live state. Raises TimeoutError if the copy does not
        stop.
        """
        if self._done is not None and not wait([self._done], grace_s).done:
            self.stopped = True
            if not wait([self._done], STOP_S).done:
                raise TimeoutError(f"the copying thread did not stop within {STOP_S} s")
        self._thread.shutdown(wait=False)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


class WaitBudget:
    """The time that training may still spend waiting for late checkpoints, in seconds.

    The budget grows by a share of the training time and starts with a fixed amount. It covers a
    tier that is late now and then, and one that is always a little late. For a tier that is always
    later than the share allows, only the initial amount is spent; after that checkpoints become
    rarer and steps do not become longer.
    """

    def __init__(self, max_s: float, share: float) -> None:
        """Start with `max_s`, which is also the maximum; earn `share` of the training time."""
        self._max_s = max_s
        self._share = share
        self._earned_s = 0.0  # earned in the last step
        self._initial_left_s = max_s  # rest of the initial amount
        self._recent_s: deque[float] = deque(maxlen=_RECENT_COUNT)
        self.left_s = max_s

    def earn(self, trained_s: float) -> None:
        """Add the share of `trained_s` seconds of training."""
        self._earned_s = self._share * trained_s
        self.left_s = min(self._max_s, self.left_s + self._earned_s)

    def allowance_s(self, since_s: float) -> float:
        """Seconds to wait for a checkpoint that was started `since_s` ago."""
        late_s = self._usual_s() - since_s
        if late_s <= self._earned_s:
            return self.left_s
        spendable_s = min(self.left_s, self._initial_left_s)
        return spendable_s if late_s <= spendable_s else 0.0  # a shorter wait would be wasted

    def record_wait(self, since_s: float, waited_s: float, *, arrived: bool) -> None:
        """Spend `waited_s` on a checkpoint that had been started `since_s` before the wait."""
        if self._usual_s() - since_s > self._earned_s:
            self._initial_left_s = max(0.0, self._initial_left_s - waited_s)
        self.left_s = max(0.0, self.left_s - waited_s)
        self._recent_s.append(since_s + waited_s if arrived else inf)

    def _usual_s(self) -> float:
        return median(self._recent_s) if self._recent_s else 0.0
