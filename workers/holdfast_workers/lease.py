"""Leases: for how long ranks may step without hearing from a supervisor.

An agent beats its own clock to its supervisor, who sends the beat back as a grant: "I heard you
when your clock said that, and attempt n is the one that may step". The lease runs from that moment
of the agent's own clock, so a grant that was long under way, or heard twice, buys nothing. Whoever
has sent no grant since knows when the lease has ended, without an answer: P1 then holds for ranks
that nobody can reach. Ranks without a lease do not end: they hold before they change their state,
until a supervisor grants their attempt again, or a fence ends it.

All clocks are CLOCK_BOOTTIME: the processes of a node share it, and it goes on while the machine is
suspended, as the time of those does who wait for a lease to end.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

_BEAT = struct.Struct("<d")
BEAT_BYTES = _BEAT.size
_GRANT = struct.Struct("<qqdd")
GRANT_BYTES = _GRANT.size

TELLING_SHARE = 0.125
"""Workers are told again when their lease has grown by this share of its whole length."""


def clock_s() -> float:
    """What a lease is measured by, now."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True)
class Grant:
    """A supervisor's word to one agent. Seconds."""

    epoch: int
    attempt: int
    """The one whose ranks may step."""
    lease_s: float
    heard: float = 0.0
    """What the agent's clock said in the beat that this answers."""

    def answering(self, beat: bytes) -> bytes:
        """As it goes to the agent that sent `beat`."""
        (heard,) = _BEAT.unpack(beat)
        return replace(self, heard=heard).pack()

    def pack(self) -> bytes:
        return _GRANT.pack(self.epoch, self.attempt, self.lease_s, self.heard)

    @classmethod
    def unpack(cls, packed: bytes) -> Grant:
        return cls(*_GRANT.unpack(packed))


def beat(now: float) -> bytes:
    """What an agent sends at `now`, by its own clock."""
    return _BEAT.pack(now)


class Lease:
    """What an agent was granted last. `tell(attempt, until)` is called, from whichever thread
    brings a grant, often enough for workers never to run short of a lease that is renewed."""

    def __init__(self, tell: Callable[[int, float], None]) -> None:
        self._tell = tell
        self._lock = threading.Lock()
        self._attempt = 0
        self._until = 0.0
        self._told = 0.0

    def renew(self, grant: Grant) -> None:
        """Take a grant; one of an older attempt, or one that ends no later, changes nothing."""
        until = grant.heard + grant.lease_s
        with self._lock:
            if (grant.attempt, until) <= (self._attempt, self._until):
                return
            if grant.attempt > self._attempt:
                self._told = 0.0
            self._attempt, self._until = grant.attempt, until
            if until - self._told < grant.lease_s * TELLING_SHARE:
                return
            self._told = until
        self._tell(grant.attempt, until)

    def until(self, attempt: int) -> float:
        """When the lease of `attempt` ends, by `clock_s`; 0 if it has none."""
        with self._lock:
            return self._until if attempt == self._attempt else 0.0
