"""Records in the job's folder which injected faults its supervisors have accepted.

No fault is carried out twice. Faults are numbered per job from 1 and accepted in that order. The
number is durable before the fault is carried out: if the supervisor dies of the fault, or between
the two, its successor does not repeat it.
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
        """True once for each number, across restarts of the supervisor."""
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
        except (FileNotFoundError, ValueError):  # a damaged file must not block faults
            return 0
