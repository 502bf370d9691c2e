"""Cutting a node's own network links for a while, for who injects a partition.

Only links that the node's operator has named in `HOLDFAST_CUTTABLE_LINKS` (spaces between), so that
nobody loses a machine by a request. A process of its own cuts and mends them, whatever becomes of
the agent meanwhile; it needs CAP_NET_ADMIN in the node's network namespace, and `ip` (iproute2).
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
    """`cut(seconds)`, which returns at once; None where no link may be cut."""
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
            start_new_session=True,  # it has to outlive the agent to mend what it has cut
        )

    return cut


def main(arguments: Sequence[str]) -> None:
    seconds, links = float(arguments[0]), arguments[1:]
    with contextlib.ExitStack() as mending:
        for link in links:
            routes = _ip("route", "save", "dev", link)
            mending.callback(_mend, link, routes)
            _ip("link", "set", link, "down")
        time.sleep(seconds)


def _mend(link: str, routes: bytes) -> None:
    """A link that was down has lost its routes; those that come with its address are there."""
    _ip("link", "set", link, "up")
    with tempfile.TemporaryFile() as saved, contextlib.suppress(subprocess.CalledProcessError):
        saved.write(routes)
        saved.seek(0)  # `ip` wants to go back in it
        _ip("route", "restore", given=saved)


def _ip(*words: str, given: IO[bytes] | None = None) -> bytes:
    done = subprocess.run(["ip", *words], stdin=given, capture_output=True, check=True)
    return done.stdout


if __name__ == "__main__":
    main(sys.argv[1:])
