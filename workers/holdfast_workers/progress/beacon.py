"""The progress beacon: how far a rank has come, in shared memory, for its agent to read.

The training thread writes; the agent reads, without any help of the worker's: a worker that is
stopped, that holds the interpreter's lock for ever, or that is stuck in C++ is seen as it stands.
A write is a few words, some hundred nanoseconds. Each record begins and ends with the same counter,
written first and last, each by itself, since `pack_into` zeroes all that it writes to before: a
reader that finds two different ones has met a write under way, and takes what it read before, also
where the writer was stopped in that very moment.

The file has one record for the phase, one for each process group, and a ring of the phases that
have ended, each with the longest time in it without a sign of life: what limits are learned from
(:mod:`holdfast_workers.progress.hang_limits`). A sign of life is a new phase or micro-batch, or a
collective entered or left. Needs no torch.
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
"""The same between their counters."""
_PAST = struct.Struct("<16sq?7x")
"""Phase, longest standstill in nanoseconds, cold."""

_PHASE_AT = 0
_GROUPS_AT, _GROUP_STRIDE, MOST_GROUPS = 128, 96, 20
_RING_AT, RING = 2048, 64
FILE_BYTES = _RING_AT + RING * _PAST.size

IDLE = ""
"""The phase of a worker that is in no attempt."""

_GROUP_NAME_BYTES = 24
_TRIES = 3

_BODY_AT = _COUNTER.size
_PHASE_END, _GROUP_END = (one.size - _COUNTER.size for one in (_PHASE, _GROUP))

_write_counter, _write_phase, _write_group = (
    one.pack_into for one in (_COUNTER, _PHASE_BODY, _GROUP_BODY)
)
_monotonic_ns = time.monotonic_ns
_current: ContextVar[Beacon | None] = ContextVar("beacon", default=None)


@contextmanager
def phase(name: str = "user", *, bound_s: float | None = None) -> Iterator[None]:
    """Declare what the training thread does meanwhile, for functions of a user's.

    It may be without a sign of life for `bound_s` seconds, whatever was learned; without a bound
    that is learned, as for every phase. `name` has 16 bytes at most. Outside of a worker, and in
    other threads than its first, nothing happens.
    """
    beacon = _current.get()
    if beacon is None:
        yield
        return
    with beacon.within(name, bound_s or 0.0):
        yield


class GroupTrack:
    """The collectives of one process group: `enter` before each, `leave` after."""

    __slots__ = ("_at", "_beacon", "_buffer", "_entered", "_kind", "_left", "_name", "_words")

    def __init__(self, beacon: Beacon, buffer: memoryview, at: int, name: bytes) -> None:
        self._beacon = beacon
        self._buffer = buffer
        self._at = at
        self._name = name
        self._kind = b""
        self._entered = 0
        self._left = 0
        self._words = 0

    def enter(self, kind: bytes) -> int:
        """A collective is about to be issued. The time, for `leave`."""
        self._entered += 1
        self._kind = kind
        return self._write()

    def leave(self, entered_ns: int) -> None:
        """The last one has returned, and so has every one before it: a group runs them in order."""
        self._left = self._entered
        self._beacon.blocked_ns += self._write() - entered_ns

    def _write(self) -> int:
        now = self._beacon.change()
        self._words = words = self._words + 1
        buffer, at = self._buffer, self._at
        _write_counter(buffer, at, words)
        _write_group(buffer, at + _BODY_AT, self._name, self._kind, self._entered, self._left, now)
        _write_counter(buffer, at + _GROUP_END, words)
        return now


class Beacon:
    """The writing side. Written to by the training thread, and by one that it waits for."""

    def __init__(self, path: Path) -> None:
        """Open the file that the agent has made by :func:`create`."""
        self._buffer = memoryview(_mapped(path, writable=True))
        self._attempt = 0
        self._words = 0
        self._changed_ns = _monotonic_ns()
        self._longest_ns = 0
        self._standing = (IDLE, 0, 0, 0.0)  # phase, step, micro-batch, bound
        self._name = b""
        self._by_name: dict[str, GroupTrack] = {}
        self.tracks: dict[int, GroupTrack] = {}
        """By the identity of their process groups, for whoever counts; of this attempt alone."""
        self.cold = True
        """Whether what begins now may take longer than it will later: first steps, compiling."""
        self._began_cold = True
        self.blocked_ns = 0
        """Time spent so far in collectives."""

    def make_current(self) -> None:
        """Let :func:`phase` find it, in this thread."""
        _current.set(self)

    def begin(self, attempt: int) -> None:
        """From here on everything is of `attempt`, and its collectives are counted from 0."""
        self.tracks.clear()
        self._by_name.clear()
        for index in range(MOST_GROUPS):
            at = _GROUPS_AT + index * _GROUP_STRIDE
            self._buffer[at : at + _GROUP.size] = bytes(_GROUP.size)
        self._attempt = attempt
        self.cold = True

    def enter(self, name: str, step: int, micro_batch: int = 0, bound_s: float = 0.0) -> None:
        """Phase `name` begins, and the one before it has ended as it should."""
        now = self.change()
        self._note_past()
        self._standing = (name, step, micro_batch, bound_s)
        self._write(now)

    def end(self) -> None:
        """The attempt is over."""
        self._break_off((IDLE, 0, 0, 0.0))

    @contextmanager
    def within(self, name: str, bound_s: float) -> Iterator[None]:
        """Phase `name` inside of the one that is, which goes on afterwards."""
        outer = self._standing
        self.enter(name, outer[1], outer[2], bound_s)
        try:
            yield
        except BaseException:
            self._break_off(outer)
            raise
        self.enter(*outer)

    def track(self, group: str) -> GroupTrack | None:
        """The collectives of a process group; None for more groups than there is room for."""
        track = self._by_name.get(group)
        if track is None and len(self._by_name) < MOST_GROUPS:
            at = _GROUPS_AT + len(self._by_name) * _GROUP_STRIDE
            name = group.encode()[:_GROUP_NAME_BYTES]
            track = self._by_name[group] = GroupTrack(self, self._buffer, at, name)
        return track

    def change(self) -> int:
        """There is a sign of life: now."""
        now = _monotonic_ns()
        stood = now - self._changed_ns
        if stood > self._longest_ns:  # noqa: PLR1730 (`max` costs three times as much)
            self._longest_ns = stood
        self._changed_ns = now
        return now

    def _break_off(self, standing: tuple[str, int, int, float]) -> None:
        """As `enter`, but nothing is learned of the phase that ends."""
        now = self.change()
        self._longest_ns = 0
        self._note_past()
        self._standing = standing
        self._write(now)

    def _note_past(self) -> None:
        """The phase that ends comes into the ring, before the counter says so."""
        at = _RING_AT + self._words % RING * _PAST.size
        _PAST.pack_into(self._buffer, at, self._name, self._longest_ns, self._began_cold)
        self._longest_ns = 0

    def _write(self, now: int) -> None:
        name, step, micro_batch, bound_s = self._standing
        self._name = name.encode()
        self._began_cold = self.cold
        self._words = words = self._words + 1
        buffer = self._buffer
        _write_counter(buffer, _PHASE_AT, words)
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
        _write_counter(buffer, _PHASE_AT + _PHASE_END, words)


@dataclass(frozen=True)
class Reading:
    """What a beacon says."""

    phases: int
    """Phases entered so far, in all attempts."""
    phase: str
    attempt: int
    step: int
    micro_batch: int
    bound_s: float
    """Declared for this phase; 0 if it was not."""
    cold: bool
    changed_ns: int
    """When it last changed, by `time.monotonic_ns()`."""
    groups: tuple[GroupBeat, ...]


@dataclass(frozen=True)
class PastPhase:
    """A phase that has ended, with the longest time in it without a sign of life."""

    phase: str
    stood_s: float
    cold: bool


class BeaconReader:
    """The reading side, of one thread at a time."""

    def __init__(self, path: Path) -> None:
        self._buffer = memoryview(_mapped(path, writable=False))
        self._records: dict[int, tuple[Any, ...]] = {}
        self._told = 0

    def read(self) -> Reading | None:
        """What it says now; None before it has said anything."""
        record = self._record(_PHASE_AT, _PHASE)
        if not record[0]:
            return None
        words, name, attempt, step, micro_batch, bound_s, cold, changed_ns, _ = record
        groups: list[GroupBeat] = []
        for index in range(MOST_GROUPS):
            group = self._record(_GROUPS_AT + index * _GROUP_STRIDE, _GROUP)
            if not group[0]:
                break
            changed_ns = max(changed_ns, group[5])
            groups.append(GroupBeat(_text(group[1]), group[3], group[4], _text(group[2])))
        return Reading(
            phases=words,
            phase=_text(name),
            attempt=attempt,
            step=step,
            micro_batch=micro_batch,
            bound_s=bound_s,
            cold=cold,
            changed_ns=changed_ns,
            groups=tuple(groups),
        )

    def past(self) -> list[PastPhase]:
        """The phases that have ended since it was last asked; of many, the newest."""
        ended = self._record(_PHASE_AT, _PHASE)[0]
        ring = bytes(self._buffer[_RING_AT : _RING_AT + RING * _PAST.size])
        # What was being overwritten meanwhile is left out.
        first = max(self._told, self._record(_PHASE_AT, _PHASE)[0] + 1 - RING)
        self._told = max(self._told, ended)
        found = [_PAST.unpack_from(ring, at % RING * _PAST.size) for at in range(first, ended)]
        return [
            PastPhase(_text(n), stood * 1e-9, cold) for n, stood, cold in found if stood and n[0]
        ]

    def _record(self, at: int, layout: struct.Struct) -> tuple[Any, ...]:
        """A record; the last whole one, if it is being written, or was when its writer stopped."""
        for _ in range(_TRIES):
            (last,) = _COUNTER.unpack_from(self._buffer, at + layout.size - _COUNTER.size)
            record = layout.unpack(self._buffer[at : at + layout.size])
            if _COUNTER.unpack_from(self._buffer, at)[0] == last:
                self._records[at] = record
                return record
        return self._records.get(at, layout.unpack(bytes(layout.size)))


def path_of(folder: Path, worker: str) -> Path:
    """Where the beacon of a worker lies."""
    return folder / f"{worker}.beacon"


def remove_all(folder: Path) -> None:
    """Remove what an agent that died has left behind: its workers died with it."""
    for path in folder.glob("*.beacon"):
        path.unlink(missing_ok=True)


def create(path: Path) -> None:
    """Make the file of a beacon, for one worker's life."""
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
