"""Cuts a node's own network links for some time, for injected partitions.

Only the links that the node's operator lists in `HOLDFAST_CUTTABLE_LINKS` (separated by spaces) may
be cut, so that no request can disconnect a machine for good. A separate process cuts and restores
the links, even if the agent dies meanwhile; it needs CAP_NET_ADMIN in the node's network namespace,
and `ip` (iproute2).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO

VARIABLE = "HOLDFAST_CUTTABLE_LINKS"


def link_cutter(environ: Mapping[str, str] = os.environ) -> Callable[[float], None] | None:
    """The function `cut(seconds)`, which returns at once; None if no link may be cut."""
    links = environ.get(VARIABLE, "").split()
    if not links or shutil.which("ip") is None:
        return None

    def cut(seconds: float) -> None:
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "holdfast_workers.fault_injection.link_cut",
                str(seconds),
                *links,
            ],
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
