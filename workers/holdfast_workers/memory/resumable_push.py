"""Incoming replicas: the part that has arrived stays valid when its connection breaks.

A partner that reconnects with the same state resumes where it was cut off. This weakens no check:
the digest covers every byte, including those received before the break.
"""

from __future__ import annotations

import socket
import weakref
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from holdfast_workers.memory import wire
from holdfast_workers.memory.segment import Commit, Segment

_PIECE = 4 * 1024 * 1024  # the unit of progress: an incomplete piece is sent again


@dataclass(frozen=True)
class AnnouncedState:
    """Identifies the state that a push announces."""

    attempt: int
    step: int
    digest: str


@dataclass
class _Arrival:
    # A weak reference: a segment that is dropped in the meantime must free its memory.
    segment: weakref.ref[Segment]
    state: AnnouncedState
    filled: int = 0
    hasher: xxhash.xxh3_128 = field(default_factory=xxhash.xxh3_128)


class ReplicaIntake:
    """Receives replicas into segments, several segments at a time.

    The caller holds the write lock of the segment (`SegmentStore.writing`) during each call."""

    def __init__(self) -> None:
        self._arrivals: dict[Path, _Arrival] = {}

    def begin(self, segment: Segment, state: AnnouncedState, keep: Commit | None = None) -> int:
        """Start to receive `state`, or resume it, without touching `keep`. Returns the offset of
        the first missing byte."""
        arrival = self._arrivals.get(segment.path)
        resumes = arrival is not None and (arrival.segment(), arrival.state) == (segment, state)
        if arrival is not None and resumes and segment.unfinished is not None:
            return arrival.filled
        segment.begin(state.step, keep=keep).release()
        self._arrivals[segment.path] = _Arrival(weakref.ref(segment), state)
        return 0

    def receive(self, segment: Segment, sock: socket.socket) -> bool:
        """Receive the missing bytes of the state begun. True if all bytes have its digest.

        Raises OSError or WireError if the connection breaks; the complete pieces are kept.
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
