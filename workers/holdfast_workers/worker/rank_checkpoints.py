"""One rank's checkpoints while an attempt runs: its segment, and the copies for its savers.

A background thread writes both while training continues; the training thread starts a copy and
waits for its capture before the state changes. Only complete checkpoints are reported to the agent.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import structlog

from holdfast_workers.memory.background_copy import BackgroundCopies
from holdfast_workers.memory.frozen_copies import copy_path
from holdfast_workers.memory.relaid_segment import relaid
from holdfast_workers.memory.segment import BadSegment, Commit, Segment, SegmentSpaceError
from holdfast_workers.protocol.messages import JoinOrder
from holdfast_workers.protocol.processes import (
    CommittedToMemory,
    FrozenCopy,
    WorkerMessage,
    WorkerSignal,
)
from holdfast_workers.protocol.signals import ShardFailed
from holdfast_workers.state.rank_state import CopyStopped

if TYPE_CHECKING:
    from holdfast_workers.fault_injection.fault_points import FaultPoints
    from holdfast_workers.state.digest import ShardDigest
    from holdfast_workers.state.layout import StateLayout
    from holdfast_workers.state.rank_state import Snapshot

COPY_CHUNK_BYTES = 1 << 24

_log = structlog.get_logger()


class RankCheckpoints:
    """`send` sends a message to the agent."""

    def __init__(
        self,
        order: JoinOrder,
        send: Callable[[WorkerMessage], None],
        faults: FaultPoints,
    ) -> None:
        self.memory_step = -1
        """The newest step committed to memory; -1 for none."""
        self.memory_committed_at = 0.0
        """The time of that commit, on the monotonic clock."""
        self.path = Path(order.segment_path)
        self._number = order.attempt
        self._rank = order.rank
        self._send = send
        self._faults = faults
        self._segment: Segment | None = None
        self._fitting: StateLayout | None = None  # the layout that was found equal to the segment's
        self._copies = BackgroundCopies()
        self._saver_copies: set[Path] = set()  # copies for savers
        self._makes_saver_copy = False

    def start(
        self,
        snapshot: Snapshot,
        step: int,
        *,
        to_memory: bool,
        metrics: dict[str, float] | None,
        last: bool,
    ) -> Callable[[], ShardDigest]:
        """Start to copy `snapshot` of `step`; the returned function waits for its digest.

        The step goes to the remote tier with its `metrics`; None means that it is not due there.
        If shared memory has no room for the saver's copy, the copy is skipped and that is reported.
        For the `last` step it is an error, because no later checkpoint can replace it.
        """
        make_copy = self.leave_for_saver if last else self._leave_if_it_fits
        self._makes_saver_copy = self._makes_saver_copy or metrics is not None
        return self._copies.start(
            lambda captured: self._copy_out(snapshot, step, to_memory, metrics, captured, make_copy)
        )

    def await_captured(self) -> None:
        """Return once the live state may change. Raises the error that prevented its capture."""
        self._copies.await_captured()

    def finish(self) -> None:
        """Wait for the last copy and end the thread."""
        self._copies.finish()

    def end(self, grace_s: float) -> None:
        """Wait up to `grace_s` for a running copy to complete, and close the segment."""
        self._copies.end(grace_s)
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def has_pending_saves(self) -> bool:
        """Whether a copy of this rank is being made for a saver, or its saver is not done."""
        if self._makes_saver_copy:
            return True
        self._saver_copies -= {path for path in tuple(self._saver_copies) if not path.exists()}
        return bool(self._saver_copies)

    def is_newest_in_memory(self) -> bool:
        """Whether memory still contains the newest step that was committed to it."""
        return self._segment is not None and self._segment.file_exists

    def step_being_read(self) -> int | None:
        """The older step in memory, which the next one overwrites, if a reader needs it."""
        segment = self._segment
        older = segment.commits()[1:] if segment is not None else []
        return next((c.step for c in older if segment is not None and segment.is_pinned(c)), None)

    def segment(self, layout: StateLayout) -> Segment:
        """This rank's own segment: the existing one if its layout fits, otherwise a new one."""
        if self._segment is not None and not self._segment.file_exists:
            _log.warning("a segment was removed from outside: it is created again", path=self.path)
            self._segment.close()
            self._segment = None
        if self._segment is None:
            self._segment = _open_matching(self.path, layout) or Segment.create(self.path, layout)
        elif layout is not self._fitting and layout != self._segment.layout:
            former, self._segment = self._segment, relaid(self._segment, layout)
            former.close()
        self._fitting = layout
        return self._segment

    def adopt_commit(self, segment: Segment, commit: Commit) -> None:
        """Record that the live state is that of `commit` in this rank's own segment."""
        segment.make_newest(commit)
        self._segment, self._fitting = segment, None
        self.memory_step, self.memory_committed_at = commit.step, time.monotonic()

    def write_memory(self, snapshot: Snapshot, step: int) -> tuple[Commit, ShardDigest]:
        """Copy the snapshot to memory and commit it now."""
        segment = self.segment(snapshot.layout)
        newest = next(iter(segment.commits()), None)  # it may be the only one that all ranks have
        digest = snapshot.copy_to(segment.begin(step, keep=newest), self._stopped)
        self._faults.reach("memory", step)
        commit = segment.commit(attempt=self._number, step=step, digest=digest.whole)
        self.memory_step, self.memory_committed_at = step, time.monotonic()
        self._send(CommittedToMemory(self._number, step))
        self._faults.reach("committed", step)
        return commit, digest

    def leave_for_saver(
        self,
        step: int,
        layout: StateLayout,
        write: Callable[[memoryview], ShardDigest],
        metrics: dict[str, float],
    ) -> ShardDigest:
        """Create a copy of the state with `write` for the saver, and return its digest.

        Raises SegmentSpaceError if shared memory has no room for it.
        """
        self._faults.reach("save", step)
        path = copy_path(self.path.parent, self._rank, step, self._number)
        path.unlink(missing_ok=True)
        self._saver_copies.add(path)
        with Segment.create(path, layout) as copy:
            digest = write(copy.begin(step))
            copy.commit(attempt=self._number, step=step, digest=digest.whole)
        self._send(FrozenCopy(str(path), self._rank, self._number, step, metrics))
        self._faults.reach("saved", step)
        return digest

    def _leave_if_it_fits(
        self,
        step: int,
        layout: StateLayout,
        write: Callable[[memoryview], ShardDigest],
        metrics: dict[str, float],
    ) -> ShardDigest | None:
        try:
            return self.leave_for_saver(step, layout, write, metrics)
        except SegmentSpaceError as error:
            self._send(WorkerSignal(self._number, self._rank, ShardFailed(step, str(error))))
            return None

    def _copy_out(
        self,
        snapshot: Snapshot,
        step: int,
        to_memory: bool,
        metrics: dict[str, float] | None,
        captured: Callable[[ShardDigest], None],
        make_copy: Callable[..., ShardDigest | None],
    ) -> None:
        """Runs in the copying thread; calls `captured` once the live state may change again."""
        if not to_memory:
            write = partial(snapshot.copy_to, stopped=self._stopped)
            digest = make_copy(step, snapshot.layout, write, metrics or {})
            captured(digest or snapshot.shard_digest())
            self._makes_saver_copy = False
            return
        commit, digest = self.write_memory(snapshot, step)
        captured(digest)
        if metrics is not None:
            assert self._segment is not None
            payload = self._segment.payload(commit)
            make_copy(
                step,
                snapshot.layout,
                lambda view: self._copy_payload(payload, view, digest),
                metrics,
            )
            self._makes_saver_copy = False

    def _copy_payload(
        self, source: memoryview, target: memoryview, digest: ShardDigest
    ) -> ShardDigest:
        to, origin = (np.frombuffer(view, dtype=np.uint8) for view in (target, source))
        for start in range(0, origin.nbytes, COPY_CHUNK_BYTES):
            if self._stopped():
                raise CopyStopped
            to[start : start + COPY_CHUNK_BYTES] = origin[start : start + COPY_CHUNK_BYTES]
        return digest

    def _stopped(self) -> bool:
        return self._copies.stopped


def _open_matching(path: Path, layout: StateLayout) -> Segment | None:
    """The segment at `path` if it is valid and has this layout; otherwise the file is removed."""
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
