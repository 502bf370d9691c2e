"""Records in the job's fence which injected faults its supervisors have accepted.

No fault is carried out twice, on whichever node a supervisor starts again. Faults are numbered per
job from 1 and accepted in that order. The number is stored before the fault is carried out: if the
supervisor dies of the fault, or between the two, its successor does not repeat it.
"""

from __future__ import annotations

import re
import secrets
import threading

from holdfast_workers.checkpoint.storage import ObjectExists, Storage

_NAME = re.compile(r"fault-(\d+)")


class InjectionRecord:
    """Thread-safe. A fault's number is an object that is created and never replaced."""

    def __init__(self, fence: Storage) -> None:
        self._storage = fence
        self._newest = 0
        self._token = secrets.token_hex(16).encode()
        self._lock = threading.Lock()

    def take(self, number: int) -> bool:
        """True once for each number, across restarts of the supervisor. Raises StorageError while
        that is unknown: the fault is to be sent again."""
        with self._lock:
            if number <= self._newest:
                return False
            found = (_NAME.fullmatch(name) for name in self._storage.objects())
            stored = max((int(name[1]) for name in found if name), default=0)
            if number < stored or not self._create(number):
                self._newest = max(stored, number)
                return False
            self._newest = number
            return True

    def _create(self, number: int) -> bool:
        """False if another supervisor took the number. An earlier try of this one may have stored
        it although its answer was lost."""
        name = f"fault-{number:08d}"
        try:
            self._storage.put_new(name, self._token)
        except ObjectExists:
            return self._storage.read(name) == self._token
        return True
