"""Replicas on their way in: what has arrived of one stays good when its connection breaks.

A partner that comes again with the same state goes on where it was cut off. Nothing is believed
for that: the digest is taken over every byte, those from before the break included.
"""

from __future__ import annotations

import socket
import weakref
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from holdfast_workers.memory import wire
from holdfast_workers.memory.segment import Segment

_PIECE = 4 * 1024 * 1024  # of a piece that was cut off in its middle, all is sent again


@dataclass(frozen=True)
class Announced:
    """Which state a push is of."""

    attempt: int
    step: int
    digest: str


@dataclass
class _Arrival:
    # Held loosely: a segment that is dropped meanwhile must give its memory back.
    segment: weakref.ref[Segment]
    state: Announced
    filled: int = 0
    hasher: xxhash.xxh3_128 = field(default_factory=xxhash.xxh3_128)


class Intake:
    """A segment has one writer at a time (`SegmentStore.writing`); several may have one each."""

    def __init__(self) -> None:
        self._arrivals: dict[Path, _Arrival] = {}

    def begin(self, segment: Segment, state: Announced) -> int:
        """Make room for `state`, or go on with it; from which byte on it is wanted."""
        arrival = self._arrivals.get(segment.path)
        known = arrival is not None and (arrival.segment(), arrival.state) == (segment, state)
        if arrival is not None and known and segment.unfinished is not None:
            return arrival.filled
        segment.begin(state.step).release()
        self._arrivals[segment.path] = _Arrival(weakref.ref(segment), state)
        return 0

    def receive(self, segment: Segment, sock: socket.socket) -> bool:
        """Take in what is missing of the state begun; True if the whole has its digest.

        Raises OSError or WireError where the connection breaks: what came before that is kept.
        """
        arrival, slot = self._arrivals[segment.path], segment.unfinished
        assert slot is not None
        with slot:
            while arrival.filled < len(slot):
                with slot[arrival.filled : arrival.filled + _PIECE] as piece:
                    hasher = arrival.hasher.copy()
                    wire.receive_into(sock, piece, hasher)
                    arrival.filled, arrival.hasher = arrival.filled + len(piece), hasher
        del self._arrivals[segment.path]
        return bool(arrival.hasher.hexdigest() == arrival.state.digest)
