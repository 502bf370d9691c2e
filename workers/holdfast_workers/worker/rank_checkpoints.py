"""One rank's own checkpoints while an attempt runs: its segment, and the copies for its savers.

The copying thread writes both, beside training; the training thread starts it, and waits for it
before the state changes. What is told to the agent here is what is whole.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from holdfast_workers.memory.background_copy import Copies
from holdfast_workers.memory.frozen_copies import copy_path
from holdfast_workers.memory.segment import BadSegment, Commit, Segment, SegmentSpaceError
from holdfast_workers.state.rank_state import CopyStopped

if TYPE_CHECKING:
    from holdfast_workers.fault_injection.fault_points import FaultPoints
    from holdfast_workers.state.layout import StateLayout
    from holdfast_workers.state.rank_state import Snapshot

COPY_PIECE = 1 << 24

_log = logging.getLogger(__name__)


class RankCheckpoints:
    """`layout` is asked for once the model is there; `say` tells the agent."""

    def __init__(
        self,
        order: dict[str, Any],
        layout: Callable[[], StateLayout],
        say: Callable[..., None],
        faults: FaultPoints,
    ) -> None:
        self.memory_step = -1
        """Newest step committed to memory; -1: none."""
        self.memory_at = 0.0
        """And when, on the monotonic clock."""
        self.path = Path(order["segment_path"])
        self._root = Path(order["segment_root"])
        self._number: int = order["attempt"]
        self._rank: int = order["rank"]
        self._layout = layout
        self._say = say
        self._faults = faults
        self._segment: Segment | None = None
        self._copies = Copies()
        self._left: set[Path] = set()  # copies for savers

    def start(
        self,
        snapshot: Snapshot,
        step: int,
        *,
        to_memory: bool,
        metrics: dict[str, float] | None,
        last: bool,
    ) -> Callable[[], str]:
        """Begin to copy `snapshot` of `step`; what is returned waits for its digest.

        `metrics` of the step go with it to the remote tier; None: it is not due there. Where
        shared memory has no room for that, it is given up and said to be; but not the `last` one,
        which nothing can stand in for: that is an error.
        """
        leave = self.leave_for_saver if last else self._leave_if_it_fits
        return self._copies.start(
            lambda captured: self._copy_out(snapshot, step, to_memory, metrics, captured, leave)
        )

    def await_captured(self) -> None:
        """Return once the live state may be changed. Raises what prevented its capture."""
        self._copies.await_captured()

    def finish(self) -> None:
        """Wait for the last copy, and end the thread."""
        self._copies.finish()

    def end(self, grace_s: float) -> None:
        """Let a copy under way become whole, for `grace_s` at most, and let go of the segment."""
        self._copies.end(grace_s)
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def are_being_saved(self) -> bool:
        """Whether a saver still has a copy of this rank's to work on."""
        self._left -= {path for path in tuple(self._left) if not path.exists()}
        return bool(self._left)

    def is_held(self) -> bool:
        """Whether the newest step that was committed to memory is still found there."""
        return self._segment is not None and self._segment.is_there

    def segment(self) -> Segment:
        """This rank's own segment: the one at hand if its layout fits, else a new one."""
        if self._segment is not None and not self._segment.is_there:
            _log.warning("%s was removed, by no part of Holdfast: made anew", self.path)
            self._segment.close()
            self._segment = None
        if self._segment is None:
            layout = self._layout()
            self._segment = _opened(self.path, layout) or Segment.create(self.path, layout)
        return self._segment

    def stand_on(self, segment: Segment, commit: Commit) -> None:
        """The live state is that of `commit`, which lies in this rank's own segment."""
        segment.go_on_from(commit)
        self._segment = segment
        self.memory_step, self.memory_at = commit.step, time.monotonic()

    def write_memory(self, snapshot: Snapshot, step: int) -> Commit:
        """Copy and commit now."""
        segment = self.segment()
        digest = snapshot.write(segment.begin(step), self._stopped)
        self._faults.reach("memory", step)
        commit = segment.commit(attempt=self._number, step=step, digest=digest)
        self.memory_step, self.memory_at = step, time.monotonic()
        self._say("committed", step=step)
        self._faults.reach("committed", step)
        return commit

    def leave_for_saver(
        self, step: int, write: Callable[[memoryview], str], metrics: dict[str, float]
    ) -> str:
        """Leave a copy of the state, which `write` makes, for the saver; its digest.

        Raises SegmentSpaceError where shared memory cannot hold it.
        """
        self._faults.reach("save", step)
        path = copy_path(self._root, self._rank, step, self._number)
        path.unlink(missing_ok=True)
        self._left.add(path)
        with Segment.create(path, self._layout()) as copy:
            digest = write(copy.begin(step))
            copy.commit(attempt=self._number, step=step, digest=digest)
        self._say("save", step=step, path=str(path), metrics=metrics)
        self._faults.reach("saved", step)
        return digest

    def _leave_if_it_fits(
        self, step: int, write: Callable[[memoryview], str], metrics: dict[str, float]
    ) -> str | None:
        try:
            return self.leave_for_saver(step, write, metrics)
        except SegmentSpaceError as error:
            self._say("unsaved", step=step, message=str(error))
            return None

    def _copy_out(
        self,
        snapshot: Snapshot,
        step: int,
        to_memory: bool,
        metrics: dict[str, float] | None,
        captured: Callable[[str], None],
        leave: Callable[..., str | None],
    ) -> None:
        """In the copying thread: `captured` is called once the live state may change again."""
        if not to_memory:
            write = partial(snapshot.write, stopped=self._stopped)
            captured(leave(step, write, metrics or {}) or snapshot.digest())
            return
        commit = self.write_memory(snapshot, step)
        captured(commit.digest)
        if metrics is not None:
            assert self._segment is not None
            payload = self._segment.payload(commit)
            leave(step, lambda view: self._copied(payload, view, commit.digest), metrics)

    def _copied(self, source: memoryview, target: memoryview, digest: str) -> str:
        into, of = (np.frombuffer(one, dtype=np.uint8) for one in (target, source))
        for start in range(0, of.nbytes, COPY_PIECE):
            if self._stopped():
                raise CopyStopped
            into[start : start + COPY_PIECE] = of[start : start + COPY_PIECE]
        return digest

    def _stopped(self) -> bool:
        return self._copies.stopped


def _opened(path: Path, layout: StateLayout) -> Segment | None:
    """The segment at `path`, if it is one and of this layout; freed if it is not."""
    try:
        segment = Segment.open(path, writable=True)
    except FileNotFoundError:
        return None
    except BadSegment:
        path.unlink()
        return None
    if segment.layout == layout:
        return segment
    segment.close()
    path.unlink()
    return None
