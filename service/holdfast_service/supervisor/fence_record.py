"""The fence of a job in its remote storage: which epochs and attempts its supervisors have used.

Every epoch and every attempt of an epoch is an object of its own that is created and never
replaced, so a late write of an older supervisor hides nothing of a later one. A supervisor first
creates its object and then lists all: of two that do so at the same time, one sees the other.

No caller waits for the storage longer than it asks to: all calls run in one thread. An error or no
answer means unknown: it is retried with the next refresh, and is never taken for an empty fence.

The fence also holds the numbers of the injected faults that were accepted, so that no fault is
carried out twice, on whichever node a supervisor starts again.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace

import structlog

from holdfast_workers.checkpoint.fence_objects import (
    FENCE_FOLDER,
    FenceFloor,
    attempt_object,
    epoch_object,
    used_numbers,
)
from holdfast_workers.checkpoint.open_storage import open_storage
from holdfast_workers.checkpoint.storage import ObjectExists, Storage, joined
from holdfast_workers.protocol.lease import clock_s
from holdfast_workers.protocol.processes import StorageOptions

_log = structlog.get_logger()
RETRY_S = 0.2
_CALL_S = 2.0
_NAME = re.compile(r"fault-(\d+)")


class ClaimLost(Exception):
    """The storage answers, but no longer holds the claim of this supervisor."""


def open_fence(remote_root: str, options: StorageOptions) -> Storage:
    """The storage of the fence of the job with this remote root. Its calls fail soon, because the
    fence retries them itself."""
    soon = replace(
        options,
        connect_timeout_s=_CALL_S,
        read_timeout_s=_CALL_S,
        part_timeout_s=_CALL_S,
        attempts=1,
    )
    return open_storage(joined(remote_root, FENCE_FOLDER), soon)


class FenceRecord:
    """The part of one supervisor in the fence. Thread-safe."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._token = secrets.token_hex(16).encode()
        self._pool = ThreadPoolExecutor(1, "fence")
        self._call: Future[None] | None = None
        self._epoch = 0
        self._attempt = 0
        self._claimed = False
        self._stored_attempt = 0
        self._failing = False
        self.floor: FenceFloor | None = None
        """The floor as last listed; None until the storage has answered."""
        self.is_superseded = False
        """Another supervisor has this epoch or a later one: this supervisor must end."""
        self.confirmed_at = 0.0
        """When the newest listing without a later supervisor began (`clock_s`)."""

    def start_reading(self) -> None:
        self._start()

    def read(self, timeout_s: float) -> FenceFloor | None:
        """The floor, waiting up to `timeout_s` for an answer; None: unknown."""
        deadline = time.monotonic() + timeout_s
        while self.floor is None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            wait([self._start()], timeout=left_s)
            if self.floor is None:
                time.sleep(min(RETRY_S, max(0.0, deadline - time.monotonic())))
        return self.floor

    def claim(self, epoch: int, timeout_s: float) -> int:
        """Claim the lowest free epoch from `epoch` on, and list the fence again. Returns it, also
        if the storage has not answered within `timeout_s`: `refresh` goes on trying."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._epoch = epoch
            wait([self._submit()], timeout=max(0.0, deadline - time.monotonic()))
            if not self.is_superseded:
                return epoch
            assert self.floor is not None
            epoch = max(epoch, self.floor.epoch) + 1
            self._claimed = self.is_superseded = False

    def announce(self, attempt: int) -> None:
        """Store an attempt of this epoch, without waiting for it."""
        if attempt > self._attempt:
            self._attempt = attempt
            self._submit()

    def wait_stored(self, attempt: int, timeout_s: float) -> None:
        """Wait until the attempt is stored, or storing it has failed; a storage that is known to
        be away is not waited for."""
        if attempt > self._stored_attempt and not self._failing and self._call is not None:
            wait([self._call], timeout=timeout_s)
            self._failing = attempt > self._stored_attempt

    def refresh(self) -> None:
        """Store what is not stored yet, and look for a later supervisor, in the background."""
        self._start()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> Future[None]:
        """Start an exchange with the storage, unless one is under way."""
        return self._call if self._call and not self._call.done() else self._submit()

    def _submit(self) -> Future[None]:
        self._call = self._pool.submit(self._exchange)
        return self._call

    def _exchange(self) -> None:
        try:
            self._store_and_list()
            self._failing = False
        except Exception as error:  # unknown, whatever the reason: the next refresh retries
            if not self._failing:
                _log.warning("the fence cannot be read or written", why=str(error))
            self._failing = True

    def _store_and_list(self) -> None:
        """First store, then list: see the top of this module."""
        asked_at, epoch, attempt = clock_s(), self._epoch, self._attempt
        if epoch and not self._claimed:
            self._claimed = _create(self._storage, epoch_object(epoch), self._token)
        if self._claimed and attempt > self._stored_attempt:
            _create(self._storage, attempt_object(epoch, attempt), self._token)
        numbers = used_numbers(self._storage.objects())
        self.floor = FenceFloor(
            max((found.epoch for found in numbers), default=0),
            max((found.attempt for found in numbers), default=0),
        )
        if not epoch:
            return
        if not self._claimed or self.floor.epoch > epoch:
            self.is_superseded = True
            return
        if epoch not in {found.epoch for found in numbers}:
            raise ClaimLost(f"{self._storage.uri}: it no longer holds epoch {epoch}")
        self._stored_attempt, self.confirmed_at = attempt, asked_at


def _create(storage: Storage, name: str, token: bytes) -> bool:
    """Create an object; False if it belongs to another supervisor. An earlier try of the one with
    this `token` may have created it although its answer was lost."""
    try:
        storage.put_new(name, token)
    except ObjectExists:
        return storage.read(name) == token
    return True


class InjectionRecord:
    """The injected faults that the job's supervisors have accepted. Thread-safe.

    Faults are numbered per job from 1 and accepted in that order. The number, an object that is
    created and never replaced, is stored before the fault is carried out: if the supervisor dies of
    the fault, or between the two, its successor does not repeat it.
    """

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
            name = f"fault-{number:08d}"
            if number < stored or not _create(self._storage, name, self._token):
                self._newest = max(stored, number)
                return False
            self._newest = number
            return True
