"""Injected faults of a node's network: resets connections, and cuts links for some time.

A reset acts as a firewall on the path would: both sides of each connection see ECONNRESET at once,
although both processes live.

Only the links that the node's operator lists in `HOLDFAST_CUTTABLE_LINKS` (separated by spaces) may
be cut, so that no request can disconnect a machine for good. A separate process cuts and restores
the links, even if the agent dies meanwhile; it needs CAP_NET_ADMIN in the node's network namespace,
and `ip` (iproute2).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO

VARIABLE = "HOLDFAST_CUTTABLE_LINKS"
_UNSPECIFIED = (ctypes.c_char * 16)()
"""A socket address of family AF_UNSPEC: connecting to it disconnects a socket, with an RST."""


def reset_connections(port: int) -> int:
    """Reset this process's connections with this local port; returns their number."""
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


def link_cutter(environ: Mapping[str, str] = os.environ) -> Callable[[float], None] | None:
    """The function `cut(seconds)`, which returns at once; None if no link may be cut."""
    links = environ.get(VARIABLE, "").split()
    if not links or shutil.which("ip") is None:
        return None

    def cut(seconds: float) -> None:
        subprocess.Popen(
            [sys.executable, "-m", __name__, str(seconds), *links],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # it must outlive the agent to restore the links
        )

    return cut


def main(arguments: Sequence[str]) -> None:
    seconds, links = float(arguments[0]), arguments[1:]
    with contextlib.ExitStack() as restoring:
        for link in links:
            routes = _ip("route", "save", "dev", link)
            restoring.callback(_restore_link, link, routes)
            _ip("link", "set", link, "down")
        time.sleep(seconds)


def _restore_link(link: str, routes: bytes) -> None:
    """Set the link up and restore its routes, which it lost while it was down; the routes that
    come with its address already exist."""
    _ip("link", "set", link, "up")
    with tempfile.TemporaryFile() as saved, contextlib.suppress(subprocess.CalledProcessError):
        saved.write(routes)
        saved.seek(0)  # `ip` seeks in its input, so it must be a file
        _ip("route", "restore", stdin=saved)


def _ip(*arguments: str, stdin: IO[bytes] | None = None) -> bytes:
    done = subprocess.run(["ip", *arguments], stdin=stdin, capture_output=True, check=True)
    return done.stdout


if __name__ == "__main__":
    main(sys.argv[1:])
