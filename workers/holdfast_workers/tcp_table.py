"""The TCP sockets of this network namespace, as the kernel shows them, with their users."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
LISTENS, ESTABLISHED = "0A", "01"
_MAPPED = "0000000000000000FFFF0000"
"""The beginning of an IPv4 address in the table of IPv6."""


@dataclass(frozen=True)
class TcpEnd:
    """A row of the kernel's tables: one end of a connection, or a listener. Addresses are in hex.
    `inode` "0": no process has it."""

    local: str
    remote: str
    state: str
    uid: int
    inode: str


def tcp_ends() -> Iterator[TcpEnd]:
    """The rows of both tables; none where the system has no such tables."""
    for table in TABLES:
        if table.exists():
            yield from parse_table(table.read_text())


def parse_table(text: str) -> Iterator[TcpEnd]:
    """The rows of a table, of IPv4 or IPv6 (proc_pid_net(5)). Pure."""
    for line in text.splitlines()[1:]:
        fields = line.split()
        local, remote = (address.removeprefix(_MAPPED) for address in fields[1:3])
        yield TcpEnd(local, remote, fields[3], int(fields[7]), fields[9])
