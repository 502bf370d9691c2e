"""A pipe by which a process notices the end of the process that owns it, even by SIGKILL.

Only the owner has the write end, and writes nothing: the kernel closes it with the owner.
"""

from __future__ import annotations

import os

STDIN = 0


class OwnerPipe:
    """The read end. Any number of processes may share it."""

    def __init__(self, descriptor: int = STDIN) -> None:
        self._descriptor = descriptor
        os.set_blocking(descriptor, False)

    def fileno(self) -> int:
        return self._descriptor

    def owner_has_ended(self) -> bool:
        try:
            return os.read(self._descriptor, 1) == b""
        except BlockingIOError:
            return False
