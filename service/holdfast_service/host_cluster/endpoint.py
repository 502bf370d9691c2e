"""The address of a head: HOST or HOST:PORT, as a user writes it. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from holdfast_service.host_cluster.errors import HostClusterError

_ENDPOINT = re.compile(
    r"(?:\[(?P<six>[0-9A-Fa-f:.%\w]+)\]|(?P<host>[^\s:\[\]/]+))(?::(?P<port>\d{1,5}))?"
)
LARGEST_PORT = 65535


@dataclass(frozen=True)
class Endpoint:
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_endpoint(text: str, default_port: int) -> Endpoint:
    """`HOST`, `HOST:PORT`, `[IPv6]` or `[IPv6]:PORT`. Raises HostClusterError."""
    found = _ENDPOINT.fullmatch(text)
    port = int(found["port"] or default_port) if found else 0
    if found is None or not 0 < port <= LARGEST_PORT:
        raise HostClusterError(
            f"{text!r} is not an address: write HOST, HOST:PORT, or [IPv6]:PORT, as "
            "`holdfast cluster up` printed it"
        )
    return Endpoint(found["six"] or found["host"], port)
