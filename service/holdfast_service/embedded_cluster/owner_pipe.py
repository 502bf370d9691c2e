"""A pipe by which a process notices the end of the process that owns it, even by SIGKILL.

Only the owner has the write end, and writes nothing: the kernel closes it with the owner.
"""

from __future__ import annotations

import os
import stat

STDIN = 0


class NotAPipe(Exception):
    """Stdin is a file, a terminal or a device: its end says nothing of an owner."""


class OwnerPipe:
    """The read end. Any number of processes may share it."""

    def __init__(self, descriptor: int = STDIN) -> None:
        """Raises NotAPipe."""
        mode = os.fstat(descriptor).st_mode
        if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
            raise NotAPipe
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor

    @classmethod
    def moved_from_stdin(cls) -> OwnerPipe:
        """The pipe of stdin. Stdin becomes /dev/null, so that processes that are started later do
        not inherit the pipe. Raises NotAPipe."""
        found = cls(os.dup(STDIN))
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, STDIN)
        os.close(null)
        return found

    def fileno(self) -> int:
        return self._descriptor

    def owner_has_ended(self) -> bool:
        try:
            return os.read(self._descriptor, 1) == b""
        except BlockingIOError:
            return False
