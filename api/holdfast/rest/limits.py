"""How long the server waits for a client, and how much it holds for one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class UploadLimits:
    """Limits of the body of a request."""

    silence_s: float = 20.0
    """Time without a byte after which an upload ends."""
    base_s: float = 60.0
    """Time that a body of any size may take ..."""
    bytes_per_s: int = 2**15
    """Speed that an upload needs beyond that time: a large body takes longer than a small one."""
    memory_bytes: int = 2**16
    """A body with more is large, and arrives on disk."""
    large_at_once: int = 8
    """Large bodies that are received or handled at a time; each may fill the memory of its size
    once it is complete."""

    def wait_s(self, received: int, elapsed_s: float) -> float:
        """How long to wait for the next bytes; not above zero: the body is overdue."""
        return min(self.silence_s, self.base_s + received / self.bytes_per_s - elapsed_s)


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of a connection, whatever it asks for."""

    idle_s: float = 5.0
    """Time between an answer and the first byte of the next request."""
    head_s: float = 10.0
    """Time from then on, or from the beginning of the connection, to the end of the head."""
    untaken_s: float = 120.0
    """Time after which an answer ends of which the client takes nothing more ..."""
    untaken_bytes: int = 2**20
    """... if more than this is held for it. A stream never is: it waits for its client."""
    at_once: int = 10_000
    """Connections that are open at a time, if the hard limit allows twice as many open files."""
