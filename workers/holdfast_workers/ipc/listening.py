"""Listening sockets of a node: within the node's range of ports, if it has one.

The range is a setting of the node and not of the server, because the firewall that it is for is the
node's. Agents on one machine share it: each begins at a random port of it, and takes the first that
is free. What gloo, NCCL and Ray listen on is not opened here.
"""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Iterator
from dataclasses import dataclass

from holdfast_workers.errors import WorkersError

RANGE_VARIABLE = "HOLDFAST_PORT_RANGE"
"""Environment variable of a node: `20000-20999`; the kernel chooses ports if it is not set."""
LOWEST_PORT = 1024
HIGHEST_PORT = 65535


class InvalidPortRange(WorkersError):
    """The text is not a range of ports."""


class PortsExhausted(WorkersError):
    """Every port of the range is in use."""


@dataclass(frozen=True)
class PortRange:
    """The ports from `first` to `last`, both included."""

    first: int
    last: int

    @classmethod
    def parse(cls, text: str) -> PortRange | None:
        """The range in `20000-20999`; None for "". Raises InvalidPortRange."""
        if not text.strip():
            return None
        first, _, last = (part.strip() for part in text.partition("-"))
        if not all(part.isascii() and part.isdigit() and len(part) <= 5 for part in (first, last)):
            raise InvalidPortRange(f"{text!r} is not a range of ports: write 20000-20999")
        found = cls(int(first), int(last))
        if not LOWEST_PORT <= found.first <= found.last <= HIGHEST_PORT:
            raise InvalidPortRange(
                f"{text!r} is not a range of ports: the first must not be above the last, and both "
                f"must be within {LOWEST_PORT}-{HIGHEST_PORT}"
            )
        return found

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"

    def __len__(self) -> int:
        return self.last - self.first + 1

    def __contains__(self, port: object) -> bool:
        return isinstance(port, int) and self.first <= port <= self.last

    def from_offset(self, offset: int) -> Iterator[int]:
        """Every port once, beginning at `first + offset` and going on at `first` after the last."""
        for step in range(len(self)):
            yield self.first + (offset + step) % len(self)


def listen(host: str, ports: PortRange | None, backlog: int) -> socket.socket:
    """A socket that listens on this address of the node, at a free port of the range, or at any if
    there is none. Raises OSError if the node has no such address; PortsExhausted."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    if ports is None:
        return socket.create_server((host, 0), family=family, backlog=backlog)
    for port in ports.from_offset(random.randrange(len(ports))):
        try:
            return socket.create_server((host, port), family=family, backlog=backlog)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise PortsExhausted(
        f"all {len(ports)} ports of {RANGE_VARIABLE}={ports} are in use on {host}: an agent needs "
        "two; set a wider range, or look for other programs that use it (ss -tlnp)"
    )
