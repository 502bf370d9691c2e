"""A storage that fails on request, like a remote tier that is unreachable or full.

Savers, publishers and restoring ranks use it. The request is a file beside the node's memory
checkpoints: an agent writes it for an injected fault, and it contains the time when the fault ends.
"""

from __future__ import annotations

import errno
import json
import os
import time
from contextlib import AbstractContextManager
from pathlib import Path

from holdfast_workers.checkpoint.storage import (
    ObjectFacts,
    ObjectReader,
    ObjectWriter,
    Storage,
    TransientStorageError,
)
from holdfast_workers.fault_injection.kinds import FaultKind

FAULT_FILE = "storage-fault.json"


def with_injected_failures(storage: Storage, fault_file: Path) -> Storage:
    """`storage` itself, or a failing wrapper while the file requests a fault."""
    try:
        request = json.loads(fault_file.read_text())
    except FileNotFoundError:
        return storage
    if time.time() >= request["until"]:
        return storage
    return FailingStorage(storage, FaultKind(request["kind"]), request["until"])


class FailingStorage:
    """A `Storage` whose calls (or whose writes only, for a full disk) fail until `until`, which is
    a `time.time()`."""

    def __init__(self, inner: Storage, kind: FaultKind, until: float) -> None:
        self._inner = inner
        self._kind = kind
        self._until = until

    @property
    def uri(self) -> str:
        return self._inner.uri

    def below(self, folder: str) -> Storage:
        return FailingStorage(self._inner.below(folder), self._kind, self._until)

    def write(self, name: str) -> AbstractContextManager[ObjectWriter]:
        self._fail(writes=True)
        return self._inner.write(name)

    def put_new(self, name: str, content: bytes) -> None:
        self._fail(writes=True)
        self._inner.put_new(name, content)

    def read(self, name: str) -> bytes:
        self._fail()
        return self._inner.read(name)

    def open(self, name: str) -> AbstractContextManager[ObjectReader]:
        self._fail()
        return self._inner.open(name)

    def objects(self) -> dict[str, int]:
        self._fail()
        return self._inner.objects()

    def listing(self, prefix: str = "") -> dict[str, ObjectFacts]:
        self._fail()
        return self._inner.listing(prefix)

    def folders(self) -> list[str]:
        self._fail()
        return self._inner.folders()

    def delete(self, name: str) -> None:
        self._fail()
        self._inner.delete(name)

    def delete_broken(self) -> None:
        self._fail()
        self._inner.delete_broken()

    def delete_all(self) -> None:
        self._fail()
        self._inner.delete_all()

    def _fail(self, *, writes: bool = False) -> None:
        if time.time() >= self._until:
            return
        if self._kind is FaultKind.REMOTE_DOWN:
            raise TransientStorageError(self.uri, "injected: it does not answer")
        if writes:
            raise TransientStorageError(self.uri, f"injected: {os.strerror(errno.ENOSPC)}")
