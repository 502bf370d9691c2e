"""Ranges of ports for agents of a test, and what its processes listen on."""

from __future__ import annotations

import contextlib
import socket
from contextlib import ExitStack

import psutil

from holdfast_workers.ipc.listening import PortRange


def free_range(size: int) -> PortRange:
    """So many ports in a row of which none is in use, outside the kernel's own range."""
    for first in range(20_000, 30_000, size):
        with ExitStack() as stack:
            try:
                for port in range(first, first + size):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
        return PortRange(first, first + size - 1)
    raise AssertionError("no free range")


def listening_ports(pid: int) -> list[int]:
    """The TCP ports on which the process and all below it listen, in order."""
    process = psutil.Process(pid)
    found: set[int] = set()
    for each in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            connections = each.net_connections("tcp")
            found |= {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}
    return sorted(found)
