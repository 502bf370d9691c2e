"""The segment of a rank whose program keeps memory checkpoints, as its program writes it.

Promises:

- The slot of the commit to keep is never touched, not even by another save of its step: a program
  that is killed at any moment leaves it as it is.
- A step that needs more room gets a larger segment. It takes the place of the former one only when
  it contains the commit to keep.

Not thread-safe.
"""

from __future__ import annotations

from pathlib import Path

import structlog

from holdfast_workers.memory.segment import BadSegment, Commit, Segment
from holdfast_workers.program_memory.payload import PROGRAM_STATE, TRAILER_BYTES, program_layout
from holdfast_workers.state.digest import payload_digest
from holdfast_workers.state.layout import aligned

HEAD_ROOM_BYTES = 1 << 20
HEAD_ROOM_SHARE = 16
"""The room of a new segment exceeds the need by its 16th part and 1 MiB."""

_log = structlog.get_logger()


def capacity_for(nbytes: int) -> int:
    """The size of the slots of a new segment for a payload of `nbytes`."""
    return aligned(nbytes + nbytes // HEAD_ROOM_SHARE + HEAD_ROOM_BYTES)


class OwnSegment:
    """`attempt` computes what is committed."""

    def __init__(self, path: Path, attempt: int) -> None:
        self._path = path
        self._attempt = attempt
        self._segment: Segment | None = None
        self._beside.unlink(missing_ok=True)  # of a program that was killed while it made one

    def current(self) -> Segment | None:
        """The segment as it is found now; None: there is none of a program."""
        if self._segment is not None and not self._segment.file_exists:
            self._segment.close()  # the agent has replaced it, or it was removed from outside
            self._segment = None
        if self._segment is None:
            self._segment = _open(self._path)
        return self._segment

    def begin(self, step: int, nbytes: int, keep: Commit | None) -> memoryview:
        """A slot for `step` with room for `nbytes` at least, other than that of `keep`; None: no
        commit is needed any more. Raises SegmentSpaceError."""
        segment = self.current()
        if segment is None:
            segment = Segment.create(self._path, program_layout(capacity_for(nbytes)))
        elif segment.layout.payload_bytes < nbytes:
            segment, keep = self._larger(segment, capacity_for(nbytes), keep)
        self._segment = segment
        return segment.begin(step, keep=keep)

    def commit(self, step: int, digest: str) -> Commit:
        """Declare the slot of the last `begin` complete."""
        assert self._segment is not None
        return self._segment.commit(attempt=self._attempt, step=step, digest=digest)

    def close(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    @property
    def _beside(self) -> Path:
        """The path at which a larger segment is made."""
        return self._path.with_suffix(".larger")

    def _larger(
        self, former: Segment, capacity: int, keep: Commit | None
    ) -> tuple[Segment, Commit | None]:
        """A segment with larger slots in the place of `former`, with the commit to keep.

        It is made beside it and renamed, so a program that is killed leaves the one or the other.
        """
        _log.info("a memory checkpoint needs more room", path=self._path.name, nbytes=capacity)
        beside = self._beside
        segment = Segment.create(beside, program_layout(capacity))
        try:
            if keep is not None:
                keep = _carry_over(former, keep, segment)
            beside.replace(self._path)
        except BaseException:
            segment.close()
            beside.unlink(missing_ok=True)
            raise
        segment.path = self._path
        former.close()
        return segment, keep


def _carry_over(source: Segment, commit: Commit, target: Segment) -> Commit:
    """Commit the same step in a larger slot: its trailer moves to the new end."""
    from_slot, to_slot = source.payload(commit), target.begin(commit.step)
    body = from_slot.nbytes - TRAILER_BYTES
    to_slot[:body] = from_slot[:body]
    to_slot[-TRAILER_BYTES:] = from_slot[body:]
    digest = payload_digest(to_slot)
    return target.commit(attempt=commit.attempt, step=commit.step, digest=digest)


def _open(path: Path) -> Segment | None:
    try:
        segment = Segment.open(path)
    except (FileNotFoundError, BadSegment):
        return None
    if [entry.name for entry in segment.layout.tensors] == [PROGRAM_STATE]:
        return segment
    segment.close()
    return None
