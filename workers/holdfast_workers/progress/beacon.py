"""The progress beacon: a rank's progress in shared memory, which its agent reads.

The training thread writes; the agent reads without any cooperation of the worker. So the agent sees
the exact progress of a worker that is stopped, holds the interpreter lock forever, or is stuck in
C++. A write takes a few hundred nanoseconds.

Each record begins and ends with the same counter. The counters are written first and last, in
separate calls, because `pack_into` first zeroes its whole target. A reader that finds two different
counters has read during a write and uses the record it read before, even if the writer was stopped
in that moment.

The file has one record for the phase, one for each process group, and a ring of the ended phases.
Each ended phase has its longest time without a sign of life, from which hang limits are learned
(:mod:`holdfast_workers.progress.hang_limits`). A sign of life is a new phase or micro-batch, or a
collective that is entered or left. The module does not need torch.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast_workers.protocol.messages import GroupBeat

_COUNTER = struct.Struct("<Q")
_PHASE_BODY = struct.Struct("<16sqqqd?7xq")
"""Phase, attempt, step, micro-batch, declared bound, cold, changed at."""
_GROUP_BODY = struct.Struct("<24s16sQQq")
"""Group, kind of the last collective, entered, left, changed at."""
_PHASE, _GROUP = (struct.Struct(f"<Q{body.format[1:]}Q") for body in (_PHASE_BODY, _GROUP_BODY))
"""The formats of the records with their two counters."""
_ENDED_PHASE = struct.Struct("<16sq?7x")
"""Phase, longest standstill in nanoseconds, cold."""

_PHASE_AT = 0
_TIMES_AT = 96
"""Two numbers of 8 bytes: steps timed, and the seconds that they were computed for."""
_WINDOW_AT = 112
"""8 bytes: the number of the window that is read, from 1; 0: none yet."""
_GROUPS_AT, _GROUP_STRIDE, MAX_GROUPS = 128, 96, 20
_RING_AT, RING_ENTRIES = 2048, 512
FILE_BYTES = _RING_AT + RING_ENTRIES * _ENDED_PHASE.size

IDLE = ""
"""The phase of a worker that is in no attempt."""

_GROUP_NAME_BYTES = 24
_READ_ATTEMPTS = 3

_BODY_AT = _COUNTER.size
_PHASE_END, _GROUP_END = (record.size - _COUNTER.size for record in (_PHASE, _GROUP))

_write_counter, _write_phase, _write_group = (
    layout.pack_into for layout in (_COUNTER, _PHASE_BODY, _GROUP_BODY)
)
_monotonic_ns = time.monotonic_ns
_current: ContextVar[Beacon | None] = ContextVar("beacon", default=None)


@contextmanager
def phase(name: str = "user", *, bound_s: float | None = None) -> Iterator[None]:
    """Declare a phase of the training thread, for users' functions.

    The phase may last `bound_s` seconds without a sign of life, regardless of learned limits;
    without a bound, the limit is learned as for every phase. `name` has at most 16 bytes. Outside
    of a worker, and in threads other than its main thread, the call has no effect.
    """
    beacon = _current.get()
    if beacon is None:
        yield
        return
    with beacon.nested_phase(name, bound_s or 0.0):
        yield


def current_track(group: str) -> GroupTrack | None:
    """The track of a group in the beacon of this thread's worker; None outside of a worker."""
    beacon = _current.get()
    return None if beacon is None else beacon.track(group)


def current() -> Beacon | None:
    """The beacon of this thread's worker; None outside of a worker."""
    return _current.get()


class GroupTrack:
    """The collectives of one process group: `enter` before each, `leave` after. Or the transfers
    from one rank to another: several may be under way, and the rank waits for one at a time."""

    __slots__ = (
        "_at",
        "_beacon",
        "_begun",
        "_buffer",
        "_entered",
        "_kind",
        "_left",
        "_name",
        "_writes",
    )

    def __init__(self, beacon: Beacon, buffer: memoryview, at: int, name: bytes) -> None:
        self._beacon = beacon
        self._buffer = buffer
        self._at = at
        self._name = name
        self._kind = b""
        self._entered = 0
        self._left = 0
        self._begun = 0
        self._writes = 0

    def enter(self, kind: bytes) -> int:
        """A collective is about to be issued. Returns the time, for `leave`."""
        self._entered += 1
        self._kind = kind
        return self._write()

    def leave(self, entered_ns: int) -> None:
        """The last collective has returned, and so have all before it, because a group runs its
        collectives in order."""
        self._left = self._entered
        self._beacon.blocked_ns += self._write() - entered_ns

    def begin_transfer(self, kind: bytes) -> int:
        """A transfer begins. Returns its number, for `enter_transfer`."""
        self._kind = kind
        self._begun += 1
        self._entered = self._left = self._begun
        self._write()
        return self._begun

    def enter_transfer(self, number: int) -> int:
        """The rank waits for a transfer that has begun. Returns the time, for
        `leave_transfer`."""
        self._entered, self._left = number, number - 1
        return self._write()

    def leave_transfer(self, entered_ns: int) -> None:
        """The transfer that the rank waited for has ended."""
        self._entered = self._left = self._begun
        self._beacon.blocked_ns += self._write() - entered_ns

    def _write(self) -> int:
        now = self._beacon.mark_progress()
        self._writes = writes = self._writes + 1
        buffer, at = self._buffer, self._at
        _write_counter(buffer, at, writes)
        _write_group(buffer, at + _BODY_AT, self._name, self._kind, self._entered, self._left, now)
        _write_counter(buffer, at + _GROUP_END, writes)
        return now


class Beacon:
    """The writing side, used by the training thread and by threads that it waits for."""

    def __init__(self, path: Path) -> None:
        """Open the file that the agent created with :func:`create`."""
        self.path = path
        self._buffer = memoryview(_mapped(path, writable=True))
        self._attempt = 0
        self._writes = 0
        self._times = self._buffer[_TIMES_AT : _TIMES_AT + 16].cast("d")
        self._window = self._buffer[_WINDOW_AT : _WINDOW_AT + 8].cast("q")
        self.take_over()
        self._changed_ns = _monotonic_ns()
        self._longest_ns = 0
        self._phase_fields = (IDLE, 0, 0, 0.0)  # phase, step, micro-batch, bound
        self._name = b""
        self._by_name: dict[str, GroupTrack] = {}
        self.tracks: dict[int, GroupTrack] = {}
        """The tracks of this attempt by the `id` of their process groups; for
        `collective_counts`."""
        self.cold = True
        """Whether the next phases may take longer than later ones: first steps, compilation."""
        self._began_cold = True
        self.blocked_ns = 0
        """Total time spent in collectives."""

    def make_current(self) -> None:
        """Make this the beacon that :func:`phase` uses in this thread."""
        _current.set(self)

    def take_over(self) -> None:
        """Continue the phases that another process of this rank has shown. One process at a time
        shows them; the other may go on to count its collectives."""
        (self._writes,) = _COUNTER.unpack_from(self._buffer, _PHASE_AT)

    def begin(self, attempt: int) -> None:
        """Start `attempt`; its collectives are counted from 0."""
        self.tracks.clear()
        self._by_name.clear()
        for index in range(MAX_GROUPS):
            at = _GROUPS_AT + index * _GROUP_STRIDE
            self._buffer[at : at + _GROUP.size] = bytes(_GROUP.size)
        self._times[0] = self._times[1] = 0.0
        self._window[0] = 0
        self._attempt = attempt
        self.cold = True

    def add_step_time(self, computed_s: float) -> None:
        """A step of a user's program took this long, without waits in collectives."""
        self._times[1] += computed_s
        self._times[0] += 1.0

    def show_window(self, window: int) -> None:
        """This window of the sample order is read, or will be next; called in any thread."""
        self._window[0] = window + 1

    def enter(self, name: str, step: int, micro_batch: int = 0, bound_s: float = 0.0) -> None:
        """Phase `name` begins, and the phase before it has ended normally."""
        now = self.mark_progress()
        self._record_ended_phase()
        self._phase_fields = (name, step, micro_batch, bound_s)
        self._write(now)

    def end(self) -> None:
        """The worker is in no attempt, and ready for the next order."""
        self._abort_phase((IDLE, 0, 0, 0.0))

    @contextmanager
    def nested_phase(self, name: str, bound_s: float) -> Iterator[None]:
        """Enter phase `name` inside the current phase, which continues afterwards."""
        outer = self._phase_fields
        self.enter(name, outer[1], outer[2], bound_s)
        try:
            yield
        except BaseException:
            self._abort_phase(outer)
            raise
        self.enter(*outer)

    def track(self, group: str) -> GroupTrack | None:
        """The track of a process group; None if there are already `MAX_GROUPS` groups."""
        track = self._by_name.get(group)
        if track is None and len(self._by_name) < MAX_GROUPS:
            at = _GROUPS_AT + len(self._by_name) * _GROUP_STRIDE
            name = group.encode()[:_GROUP_NAME_BYTES]
            track = self._by_name[group] = GroupTrack(self, self._buffer, at, name)
        return track

    def mark_progress(self) -> int:
        """Record a sign of life and return its time."""
        now = _monotonic_ns()
        elapsed_ns = now - self._changed_ns
        if elapsed_ns > self._longest_ns:  # noqa: PLR1730 (`max` costs three times as much)
            self._longest_ns = elapsed_ns
        self._changed_ns = now
        return now

    def _abort_phase(self, fields: tuple[str, int, int, float]) -> None:
        """Like `enter`, but no limit is learned from the phase that ends."""
        now = self.mark_progress()
        self._longest_ns = 0
        self._record_ended_phase()
        self._phase_fields = fields
        self._write(now)

    def _record_ended_phase(self) -> None:
        """Add the ended phase to the ring, before the counter announces it."""
        at = _RING_AT + self._writes % RING_ENTRIES * _ENDED_PHASE.size
        _ENDED_PHASE.pack_into(self._buffer, at, self._name, self._longest_ns, self._began_cold)
        self._longest_ns = 0

    def _write(self, now: int) -> None:
        name, step, micro_batch, bound_s = self._phase_fields
        self._name = name.encode()
        self._began_cold = self.cold
        self._writes = writes = self._writes + 1
        buffer = self._buffer
        _write_counter(buffer, _PHASE_AT, writes)
        _write_phase(
            buffer,
            _PHASE_AT + _BODY_AT,
            self._name,
            self._attempt,
            step,
            micro_batch,
            bound_s,
            self.cold,
            now,
        )
        _write_counter(buffer, _PHASE_AT + _PHASE_END, writes)


@dataclass(frozen=True)
class BeaconReading:
    """The content of a beacon."""

    phases: int
    """The number of phases entered so far, in all attempts."""
    phase: str
    attempt: int
    step: int
    micro_batch: int
    bound_s: float
    """The bound declared for this phase; 0 for none."""
    cold: bool
    changed_ns: int
    """The time of the last change, by `time.monotonic_ns()`."""
    groups: tuple[GroupBeat, ...]
    steps_timed: int = 0
    """See `Beacon.add_step_time`."""
    computed_s: float = 0.0
    window: int | None = None
    """See `Beacon.show_window`; None: none was shown in this attempt."""


@dataclass(frozen=True)
class EndedPhase:
    """A phase that has ended, with its longest time without a sign of life."""

    phase: str
    standstill_s: float
    cold: bool


class BeaconReader:
    """The reading side; used by one thread at a time."""

    def __init__(self, path: Path) -> None:
        self._buffer = memoryview(_mapped(path, writable=False))
        self._times = self._buffer[_TIMES_AT : _TIMES_AT + 16].cast("d")
        self._window = self._buffer[_WINDOW_AT : _WINDOW_AT + 8].cast("q")
        self._records: dict[int, tuple[Any, ...]] = {}
        self.phases_read = 0
        """The number of ended phases that were read or had been overwritten before."""

    def read(self) -> BeaconReading | None:
        """The current content; None before the first write."""
        record = self._record(_PHASE_AT, _PHASE)
        if not record[0]:
            return None
        writes, name, attempt, step, micro_batch, bound_s, cold, changed_ns, _ = record
        groups: list[GroupBeat] = []
        for index in range(MAX_GROUPS):
            group = self._record(_GROUPS_AT + index * _GROUP_STRIDE, _GROUP)
            if not group[0]:
                break
            changed_ns = max(changed_ns, group[5])
            groups.append(GroupBeat(_text(group[1]), group[3], group[4], _text(group[2])))
        return BeaconReading(
            phases=writes,
            phase=_text(name),
            attempt=attempt,
            step=step,
            micro_batch=micro_batch,
            bound_s=bound_s,
            cold=cold,
            changed_ns=changed_ns,
            groups=tuple(groups),
            steps_timed=int(self._times[0]),
            computed_s=self._times[1],
            window=self._window[0] - 1 if self._window[0] else None,
        )

    def ended_phases(self) -> list[EndedPhase]:
        """The phases that ended since the last call; only the newest if the ring overflowed."""
        newest = self._record(_PHASE_AT, _PHASE)[0]
        ring = bytes(self._buffer[_RING_AT : _RING_AT + RING_ENTRIES * _ENDED_PHASE.size])
        # Entries that may have been overwritten during the copy are left out.
        first = max(self.phases_read, self._record(_PHASE_AT, _PHASE)[0] + 1 - RING_ENTRIES)
        self.phases_read = max(self.phases_read, newest)
        entries = [
            _ENDED_PHASE.unpack_from(ring, number % RING_ENTRIES * _ENDED_PHASE.size)
            for number in range(first, newest)
        ]
        return [
            EndedPhase(_text(name), standstill_ns * 1e-9, cold)
            for name, standstill_ns, cold in entries
            if standstill_ns and name[0]
        ]

    def _record(self, at: int, layout: struct.Struct) -> tuple[Any, ...]:
        """A record; the last complete one if a write is under way or its writer was stopped."""
        for _ in range(_READ_ATTEMPTS):
            (last,) = _COUNTER.unpack_from(self._buffer, at + layout.size - _COUNTER.size)
            record = layout.unpack(self._buffer[at : at + layout.size])
            if _COUNTER.unpack_from(self._buffer, at)[0] == last:
                self._records[at] = record
                return record
        return self._records.get(at, layout.unpack(bytes(layout.size)))


def path_of(folder: Path, worker: str) -> Path:
    """The path of a worker's beacon."""
    return folder / f"{worker}.beacon"


def remove_all(folder: Path) -> None:
    """Remove the beacons of an agent that died; its workers died with it."""
    for path in folder.glob("*.beacon"):
        path.unlink(missing_ok=True)


def create(path: Path) -> None:
    """Create the beacon file for the lifetime of one worker."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, FILE_BYTES)
    finally:
        os.close(descriptor)


def _mapped(path: Path, *, writable: bool) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
    try:
        return mmap.mmap(
            descriptor, FILE_BYTES, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        )
    finally:
        os.close(descriptor)


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")
