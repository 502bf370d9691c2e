"""Step leases: how long ranks may step without contact to a supervisor.

Protocol: an agent sends its own clock reading (a beat) to its supervisor over the lifeline; the
supervisor answers with a `Grant` that repeats the reading and names the attempt that may step. The
lease runs from that reading of the agent's own clock, so a grant that is delayed or delivered twice
extends nothing.

Invariants that other modules rely on:

- A lease ends before the supervisor may declare the agent lost. After that much silence the
  supervisor knows, without an answer, that no rank of that agent still steps. So P1 (at most one
  attempt steps) also holds for unreachable ranks, and for ranks that were suspended and resume with
  an older agreement.
- A rank without a lease does not exit. It holds before it changes its state until a supervisor
  grants its attempt again or a fence ends it.
- The death of a supervisor costs no step, although its successor needs time to start: while it has
  a lease, an agent that knows the supervisor's process to have ended was not given up, because a
  supervisor forms no world before the leases of the agents that it gave up have ended. Its ranks
  may step on for `lease_s`. The successor waits that long before it replaces an agent that it has
  never reached.
- Only the end of the supervisor's process, as its kernel or its node's raylet reports it, extends a
  lease. The end of a connection never does: the supervisor may live and take the agent for lost.

All clocks are CLOCK_BOOTTIME: the processes of a node share it, and it advances while the machine
is suspended, as does the clock of a supervisor that waits for a lease to end.
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

RENEWAL_SHARE = 0.125
"""Workers are notified again when their lease has grown by this share of its whole length."""

STEPPING_SHARE = 0.75
"""Share of the silence timeout (after which an agent counts as lost) during which its ranks may
step. The rest covers differences between clocks and a step that has just been let through."""


def clock_s() -> float:
    """The clock of all leases (CLOCK_BOOTTIME), in seconds."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True)
class Grant:
    """A supervisor's permission for the ranks of one agent to step."""

    epoch: int
    """Epoch of the supervisor that grants."""
    attempt: int
    """The attempt whose ranks may step."""
    silence_s: float
    """Length of the lease, from `beat_at`."""
    lease_s: float
    """Length of the lease, from `beat_at`, if the supervisor's process is known to end before the
    lease does."""
    beat_at: float = 0.0
    """Clock reading of the agent's beat that this grant answers, in seconds (`clock_s`)."""

    def answer_to(self, beat: bytes) -> bytes:
        """This grant as the packed answer to `beat`, the bytes of `encode_beat`."""
        (beat_at,) = _BEAT.unpack(beat)
        return replace(self, beat_at=beat_at).pack()

    def pack(self) -> bytes:
        return _GRANT.pack(self.epoch, self.attempt, self.silence_s, self.lease_s, self.beat_at)

    @classmethod
    def unpack(cls, packed: bytes) -> Grant:
        return cls(*_GRANT.unpack(packed))


def encode_beat(now: float) -> bytes:
    """The bytes of a beat: `now` is the agent's own clock reading in seconds."""
    return _BEAT.pack(now)


class Lease:
    """The lease of one agent: the newest grant it received, and when it ends.

    `notify(attempt, until, number)` is called from the thread that reports the change, often enough
    that workers never run short of a lease that is being renewed. Of two notifications the one with
    the higher number is valid.
    """

    def __init__(self, notify: Callable[[int, float, int], None]) -> None:
        self._notify = notify
        self._lock = threading.Lock()
        self._grant = Grant(epoch=0, attempt=0, silence_s=0.0, lease_s=0.0)
        self._until = 0.0
        self._extended_until = 0.0
        """Limit to which the lease is extended if the supervisor's process ends."""
        self._notified_until = 0.0
        self._number = 0
        self._epoch = 0
        """Epoch of the newest supervisor that has contacted this agent."""

    def renew(self, grant: Grant) -> None:
        """Apply a grant. A grant of an older supervisor, of an older attempt of the same one, or
        for no newer beat, changes nothing.

        A successor may grant an older attempt than its predecessor did: it adopts the world of that
        attempt, because the predecessor had announced another one but formed none.
        """
        with self._lock:
            if grant.epoch < self._epoch or _order(grant) <= _order(self._grant):
                return
            if grant.attempt != self._grant.attempt:
                self._notified_until = 0.0
            self._grant = grant
            self._until = grant.beat_at + grant.silence_s
            self._extended_until = grant.beat_at + max(grant.lease_s, grant.silence_s)
            if 0 <= self._until - self._notified_until < grant.silence_s * RENEWAL_SHARE:
                return
            notification = self._notification()
        self._notify(*notification)

    def ends_at(self, epoch: int) -> float:
        """When the lease that the supervisor of this epoch has granted ends; 0 without one."""
        with self._lock:
            return self._until if epoch == self._grant.epoch else 0.0

    def supervisor_ended(self, epoch: int, now: float) -> None:
        """The process that granted under `epoch` is known to have ended: extend to `lease_s`.

        If that supervisor had given up this agent, the lease would have ended before another world
        was formed; so no other world steps now."""
        with self._lock:
            if (
                epoch != self._grant.epoch
                or now >= self._until
                or self._extended_until <= self._until
            ):
                return
            self._until = self._extended_until
            notification = self._notification()
        self._notify(*notification)

    def supervisor_replaced(self, epoch: int, now: float) -> None:
        """A successor has contacted this agent: the lease ends at most one silence timeout from
        `now`, and grants of older epochs are ignored."""
        with self._lock:
            self._epoch = max(self._epoch, epoch)
            self._extended_until = min(self._until, now + self._grant.silence_s)
            if self._until == self._extended_until:
                return
            self._until = self._extended_until
            notification = self._notification()
        self._notify(*notification)

    def until(self, attempt: int) -> tuple[float, int]:
        """When the lease of `attempt` ends (in `clock_s` time; 0 if it has none), and the number of
        this notification."""
        with self._lock:
            self._number += 1
            return (self._until if attempt == self._grant.attempt else 0.0), self._number

    def _notification(self) -> tuple[int, float, int]:
        self._notified_until = self._until
        self._number += 1
        return self._grant.attempt, self._until, self._number


def _order(grant: Grant) -> tuple[int, int, float]:
    return grant.epoch, grant.attempt, grant.beat_at
