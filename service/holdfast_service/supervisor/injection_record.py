"""Which injected faults a job's supervisors have taken on, in its folder: none is done twice.

Faults are numbered per job from 1 and taken in that order. The number is durable before the fault
is carried out: a supervisor that dies of it, or between the two, leaves a successor that does not
do it again.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path


class InjectionRecord:
    def __init__(self, job_dir: Path) -> None:
        self._path = job_dir / "faults-taken"
        self._lock = threading.Lock()

    def take(self, number: int) -> bool:
        """True once for each number, in whatever life of the supervisor."""
        with self._lock:
            if number <= self._newest():
                return False
            self._path.parent.mkdir(parents=True, exist_ok=True)
            partial = self._path.with_suffix(f".{os.getpid()}.tmp")
            with partial.open("w") as file:
                file.write(f"{number}\n")
                file.flush()
                os.fsync(file.fileno())
            partial.replace(self._path)
            return True

    def _newest(self) -> int:
        try:
            return int(self._path.read_text())
        except (FileNotFoundError, ValueError):  # a disk that lost its bytes holds up no fault
            return 0
