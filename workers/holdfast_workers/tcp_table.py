"""The TCP sockets of this network namespace, as the kernel shows them, with their users; and whose
the other end of a connection is. An end on another machine is not judged."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
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


class Owner(Enum):
    """The owner of the other end of a connection."""

    SAME_USER = auto()
    OTHER_USER = auto()
    NOT_YET = auto()
    """The connection waits in the queue of a listener."""
    UNKNOWN = auto()
    """The other end is on another machine, or closed."""


def owners_of_others(inodes: Iterable[str]) -> set[Owner]:
    """The owners of the other ends of these sockets."""
    ends = list(tcp_ends())
    by_addresses = {(end.local, end.remote): end for end in ends}
    own = {end.inode: end for end in ends}
    uid = os.getuid()
    return {owner_of_other(own[inode], by_addresses, uid) for inode in inodes if inode in own}


def owner_of_other(end: TcpEnd, ends: Mapping[tuple[str, str], TcpEnd], uid: int) -> Owner:
    """`ends`: all of this machine, by local and remote address; `uid`: this process's. Pure."""
    other = ends.get((end.remote, end.local))
    if other is None:
        return Owner.UNKNOWN
    if other.inode == "0":
        return Owner.NOT_YET if other.state == ESTABLISHED else Owner.UNKNOWN
    return Owner.SAME_USER if other.uid == uid else Owner.OTHER_USER
