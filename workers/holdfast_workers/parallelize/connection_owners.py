"""Whose the other end of a TCP connection is, if it is on this machine: the kernel shows it.

An end on another machine is not judged.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from enum import Enum, auto

from holdfast_workers.tcp_table import ESTABLISHED, TcpEnd, tcp_ends


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
