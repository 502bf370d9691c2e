"""Reaps orphans: ended processes that a child of this process had started and left behind.

This process is a subreaper, so the kernel makes it the parent of its children's helpers, such as
those of a data loader. Nobody waits for them, and each would keep its pid for ever. A child that
belongs to somebody here is never reaped: its owner needs its exit status.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from holdfast_workers.ipc import linux_processes


class Orphans:
    """`is_owned(pid)`: whether somebody in this process waits for this child."""

    def __init__(self, is_owned: Callable[[int], bool]) -> None:
        self._is_owned = is_owned
        self._seen: set[int] = set()

    def reap(self) -> None:
        """Reap the orphans that the call before had seen too: a child that was just forked is not
        owned yet, so calls must be some seconds apart."""
        found = {pid for pid in linux_processes.ended_children() if not self._is_owned(pid)}
        for pid in found & self._seen:
            with contextlib.suppress(ChildProcessError):  # somebody did wait for it
                os.waitpid(pid, os.WNOHANG)
        self._seen = found - self._seen
