"""Threads that keep the process of a program alive after the end of its main program.

The interpreter waits for them without a limit, in `threading._shutdown`: a thread that waits for
ever makes a program that has finished look like one that hangs. The process is looked at from
outside before its rank would count as one that hangs, by a process of its own: the launcher never
waits for it.
"""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import time
from typing import IO

from holdfast_workers.progress import inspection

EARLY = 0.8
"""Share of the limit of its silence after which a program is looked at."""
LOOK_S = 5.0
"""How long a look may take."""
SHOWN_FRAMES = 3
_SHUTDOWN = "_shutdown (threading.py:"
_COLLECTIVES = "torch/distributed/"


class LastThreads:
    """Looks at one process, once in each time of silence."""

    def __init__(self) -> None:
        self.found = ""
        """The threads that remain after the end of the main program, for people. Which of
        them are daemon threads cannot be seen from outside."""
        self._has_looked = False
        self._looking: tuple[subprocess.Popen[bytes], IO[bytes], float] | None = None

    def forget(self) -> None:
        """The program has shown a sign of life."""
        self._stop()
        self.found, self._has_looked = "", False

    def look(self, pid: int, silent_s: float, limit_s: float) -> bool:
        """Called again and again in a time of silence. Whether `found` is now known, and new."""
        if self._looking is None and not self._has_looked and silent_s >= EARLY * limit_s:
            self._has_looked = True
            self._begin(pid)
        if self._looking is None:
            return False
        process, output, began = self._looking
        if process.poll() is None and time.monotonic() - began < LOOK_S:
            return False
        output.seek(0)
        self.found = remaining_threads(output.read(), pid)
        self._stop()
        return bool(self.found)

    def _begin(self, pid: int) -> None:
        command = inspection.dump_command(pid)
        if command is None:
            return
        with contextlib.suppress(OSError):
            output = tempfile.TemporaryFile()  # noqa: SIM115  (until it is read)
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.DEVNULL)
            self._looking = process, output, time.monotonic()

    def _stop(self) -> None:
        if self._looking is not None:
            process, output, _ = self._looking
            process.kill()
            output.close()
            self._looking = None


def remaining_threads(dump: bytes, pid: int) -> str:
    """The threads that remain, with their innermost frames, for people; "" if the main program has
    not ended, if a thread is in a collective (then it trains), or if the dump cannot be read."""
    stacks, _ = inspection.read_dump(dump)
    main = next((stack for stack in stacks if stack.thread_id == pid), None)
    if main is None or not any(frame.startswith(_SHUTDOWN) for frame in main.frames):
        return ""
    others = [stack for stack in stacks if stack is not main and stack.frames]
    if any(_COLLECTIVES in file for stack in others for file in stack.files):
        return ""
    return "; ".join(
        f"thread {stack.name} at {' < '.join(stack.frames[:SHOWN_FRAMES])}" for stack in others
    )
