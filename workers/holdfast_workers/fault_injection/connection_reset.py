"""Resets the TCP connections of a port of this process, as a firewall on the path would.

Both sides of each connection see ECONNRESET at once, although both processes live.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import stat

_UNSPECIFIED = (ctypes.c_char * 16)()
"""A socket address of family AF_UNSPEC: connecting to it disconnects a socket, with an RST."""


def reset_connections(port: int) -> int:
    """Reset the connections with this local port; returns their number."""
    libc = ctypes.CDLL(None, use_errno=True)
    count = 0
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  (names, not files)
        with contextlib.suppress(OSError):  # closed meanwhile, or no connection
            fd = int(name)
            if stat.S_ISSOCK(os.fstat(fd).st_mode) and _is_connection(fd, port):
                count += libc.connect(fd, _UNSPECIFIED, len(_UNSPECIFIED)) == 0
    return count


def _is_connection(fd: int, port: int) -> bool:
    with socket.socket(fileno=os.dup(fd)) as end:
        if end.family not in (socket.AF_INET, socket.AF_INET6) or end.type != socket.SOCK_STREAM:
            return False
        end.getpeername()  # raises OSError for a socket that listens
        return int(end.getsockname()[1]) == port
