"""Leases: for how long ranks may step without hearing from a supervisor.

An agent beats its own clock to its supervisor, who sends the beat back as a grant: "I heard you
when your clock said that, and attempt n is the one that may step". The lease runs from that moment
of the agent's own clock, so a grant that was long under way, or heard twice, buys nothing. It ends
before the supervisor may take the agent for lost: a supervisor that has heard nothing for so long
knows, without an answer, that nobody steps there any more. P1 then holds for ranks that nobody can
reach, and for those that stood still and go on with an agreement they had heard before. Ranks
without a lease do not end: they hold before they change their state, until a supervisor grants
their attempt again, or a fence ends it.

A supervisor that dies is to cost no step, and its successor takes some time. Its kernel ends its
connections: an agent that sees this while it holds a lease knows that it is not the one that was
given up, and may let its ranks step on for `lease_s`, which the successor waits for before it
replaces an agent that it never met.

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
_GRANT = struct.Struct("<qqddd")
GRANT_BYTES = _GRANT.size

TELLING_SHARE = 0.125
"""Workers are told again when their lease has grown by this share of its whole length."""

STEPPING_SHARE = 0.75
"""For how much of the silence after which an agent counts as lost its ranks may step: what is left
is for clocks that differ, and for a step that was just let pass."""


def clock_s() -> float:
    """What a lease is measured by, now."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True)
class Grant:
    """A supervisor's word to one agent. Seconds."""

    epoch: int
    attempt: int
    """The one whose ranks may step."""
    silence_s: float
    """How long, from the beat that was heard."""
    lease_s: float
    """How long at most if the supervisor's end is seen before; 0: it lets go of the agent."""
    heard: float = 0.0
    """What the agent's clock said in the beat that this answers."""

    def answering(self, beat: bytes) -> bytes:
        """As it goes to the agent that sent `beat`."""
        (heard,) = _BEAT.unpack(beat)
        return replace(self, heard=heard).pack()

    def pack(self) -> bytes:
        return _GRANT.pack(self.epoch, self.attempt, self.silence_s, self.lease_s, self.heard)

    @classmethod
    def unpack(cls, packed: bytes) -> Grant:
        return cls(*_GRANT.unpack(packed))


def beat(now: float) -> bytes:
    """What an agent sends at `now`, by its own clock."""
    return _BEAT.pack(now)


class Lease:
    """What an agent was granted last. `tell(attempt, until, number)` is called, from whichever
    thread brings news, often enough for workers never to run short of a lease that is renewed; of
    two words the one with the higher number holds."""

    def __init__(self, tell: Callable[[int, float, int], None]) -> None:
        self._tell = tell
        self._lock = threading.Lock()
        self._grant = Grant(epoch=0, attempt=0, silence_s=0.0, lease_s=0.0)
        self._until = 0.0
        self._at_most = 0.0
        """Until when it may be extended if its supervisor is seen to end."""
        self._told = 0.0
        self._number = 0
        self._epoch = 0
        """Of the newest supervisor that has met this agent."""

    def renew(self, grant: Grant) -> None:
        """Take a grant; one of an older attempt, or of no newer beat, changes nothing."""
        with self._lock:
            if grant.epoch < self._epoch:
                return
            if grant.lease_s <= 0:
                self._at_most = self._until
                return
            if (grant.attempt, grant.heard) <= (self._grant.attempt, self._grant.heard):
                return
            if grant.attempt > self._grant.attempt:
                self._told = 0.0
            self._grant = grant
            self._until = grant.heard + grant.silence_s
            self._at_most = grant.heard + max(grant.lease_s, grant.silence_s)
            if 0 <= self._until - self._told < grant.silence_s * TELLING_SHARE:
                return
            word = self._word()
        self._tell(*word)

    def supervisor_ended(self, epoch: int, now: float) -> None:
        """The connection that brought the grants of `epoch` has ended. If its supervisor had given
        this agent up, the lease would have ended before: so it is the supervisor that is gone."""
        with self._lock:
            if epoch != self._grant.epoch or now >= self._until or self._at_most <= self._until:
                return
            self._until = self._at_most
            word = self._word()
        self._tell(*word)

    def taken_over(self, epoch: int, now: float) -> None:
        """A successor has met this agent: from now on its silence counts, and no grant of an older
        epoch."""
        with self._lock:
            self._epoch = max(self._epoch, epoch)
            self._at_most = min(self._until, now + self._grant.silence_s)
            if self._until == self._at_most:
                return
            self._until = self._at_most
            word = self._word()
        self._tell(*word)

    def until(self, attempt: int) -> tuple[float, int]:
        """When the lease of `attempt` ends, by `clock_s`, 0 if it has none; and this word's
        number."""
        with self._lock:
            self._number += 1
            return (self._until if attempt == self._grant.attempt else 0.0), self._number

    def _word(self) -> tuple[int, float, int]:
        self._told = self._until
        self._number += 1
        return self._grant.attempt, self._until, self._number
