"""Copying in the shadow of training: one thread beside the one that trains.

The training thread starts a copy right after a step has been applied and goes on; before it
changes the state again it waits until the copy has *captured* it. What the copying thread does
afterwards (a second copy for the remote tier) holds up nothing but the next copy.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from math import inf
from statistics import median

CAPTURE_S = 300.0
STOP_S = 10.0
_REMEMBERED = 8

Job = Callable[[Callable[[str], None]], None]
"""A copy. Calls what it is given with the digest, as soon as the live state is captured."""


class Copies:
    """Copies are made one after the other, in the order of their start."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shadow-copy")
        self._captured: Future[str] | None = None
        self._done: Future[None] | None = None
        self._error: BaseException | None = None
        self.stopped = False
        """To be looked at by jobs: give up soon."""

    def start(self, job: Job) -> Callable[[], str]:
        """Start a copy; what is returned waits for its digest. Raises what one before raised."""
        self._raise_what_failed()
        captured: Future[str] = Future()

        def run() -> None:
            try:
                job(captured.set_result)
            except BaseException as error:
                if error.__traceback__ is not None:  # its frames hold views of what is to be freed
                    traceback.clear_frames(error.__traceback__)
                self._error = error
                if not captured.done():
                    captured.set_exception(error)

        self._captured = captured
        self._done = self._thread.submit(run)
        return lambda: captured.result(CAPTURE_S)

    def await_captured(self) -> None:
        """Return once the live state may be changed. Raises what prevented its capture."""
        if self._captured is not None:
            self._captured.result(CAPTURE_S)

    def finish(self) -> None:
        """Wait for all of the last copy, and end the thread."""
        self.await_captured()
        if self._done is not None:
            self._done.result(CAPTURE_S)
        self._raise_what_failed()
        self._thread.shutdown(wait=False)

    def end(self, grace_s: float) -> None:
        """Let the copy under way become whole, for `grace_s` at most; then stop it.

        From the return on nothing reads the live state. Raises TimeoutError if that cannot be had.
        """
        if self._done is not None and not wait([self._done], grace_s).done:
            self.stopped = True
            if not wait([self._done], STOP_S).done:
                raise TimeoutError(f"the copying thread did not stop within {STOP_S} s")
        self._thread.shutdown(wait=False)

    def _raise_what_failed(self) -> None:
        if self._error is not None:
            raise self._error


class Patience:
    """How long training may wait for checkpoints: what it has saved up, a share of its own time.

    A tier that is late now and then is waited for, and one that is always a little late. One that
    is always later than the share allows is waited for only as long as what there was to begin
    with lasts; then checkpoints become rarer, and steps not longer.
    """

    def __init__(self, most_s: float, share: float) -> None:
        """Begins with `most_s` and never has more; earns `share` of the time trained."""
        self._most_s = most_s
        self._share = share
        self._earned_s = 0.0  # in the last step
        self._unearned_s = most_s  # of what there was to begin with
        self._took_s: deque[float] = deque(maxlen=_REMEMBERED)
        self.left_s = most_s

    def earn(self, trained_s: float) -> None:
        self._earned_s = self._share * trained_s
        self.left_s = min(self._most_s, self.left_s + self._earned_s)

    def allowance_s(self, since_s: float) -> float:
        """How long to wait for a checkpoint that has been on its way for `since_s`."""
        late_s = self._usual_s() - since_s
        if late_s <= self._earned_s:
            return self.left_s
        purse_s = min(self.left_s, self._unearned_s)
        return purse_s if late_s <= purse_s else 0.0  # no wait that would be for nothing

    def waited(self, since_s: float, waited_s: float, *, arrived: bool) -> None:
        """It had been on its way for `since_s` when `waited_s` more were spent on it."""
        if self._usual_s() - since_s > self._earned_s:
            self._unearned_s = max(0.0, self._unearned_s - waited_s)
        self.left_s = max(0.0, self.left_s - waited_s)
        self._took_s.append(since_s + waited_s if arrived else inf)

    def _usual_s(self) -> float:
        return median(self._took_s) if self._took_s else 0.0
