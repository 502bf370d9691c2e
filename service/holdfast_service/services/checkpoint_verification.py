"""Reads every byte of a checkpoint, compares it with the manifest, and reports progress meanwhile.

A verification ends when all is read, when the storage is silent for too long, or soon after its
caller stops iterating. Only the last report says whether the checkpoint is good.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator

from holdfast_service.remote_tier.storage_calls import StorageCalls
from holdfast_service.store.models import Checkpoint
from holdfast_service.views.jobs import VerificationView
from holdfast_workers.checkpoint.manifest import (
    MANIFEST,
    BadCheckpoint,
    verify,
)
from holdfast_workers.checkpoint.storage import Storage, StorageError

_REPORT_INTERVAL_S = 0.25


class _CallerGone(Exception):
    pass


class Verification:
    def __init__(self, storage: Storage, checkpoint: Checkpoint) -> None:
        self._storage = storage
        self._checkpoint = checkpoint
        self._read_bytes = 0
        self._abandoned = False

    async def progress(
        self, storage_calls: StorageCalls, silence_s: float
    ) -> AsyncGenerator[VerificationView, None]:
        """Reports until the last one, which has `done`; or a `problem`, and then proves nothing."""
        reading = storage_calls.start_reading(self._read)
        reported, since = -1, time.monotonic()
        try:
            while not reading.done():
                await asyncio.wait({reading}, timeout=_REPORT_INTERVAL_S)
                now, read_bytes = time.monotonic(), self._read_bytes
                if read_bytes != reported:
                    reported, since = read_bytes, now
                    yield self._view()
                elif now - since > silence_s:
                    yield self._view(problem=f"the storage sent no byte in {silence_s:g} s")
                    return
            try:
                yield self._view(done=True, bad=reading.result())
            except StorageError as error:
                yield self._view(problem=str(error))
        finally:
            self._abandoned = True

    def _view(
        self, *, done: bool = False, bad: str | None = None, problem: str | None = None
    ) -> VerificationView:
        return VerificationView.from_attributes(
            self._checkpoint, read_bytes=self._read_bytes, done=done, bad=bad, problem=problem
        )

    def _read(self) -> str | None:
        """Runs in a thread. Returns what is wrong with the checkpoint, or None."""
        try:
            verify(self._storage, self._count)
        except BadCheckpoint as error:
            if MANIFEST not in self._storage.objects():  # removed, which is not the same as bad
                raise StorageError(
                    self._storage.uri, "the checkpoint was removed meanwhile"
                ) from error
            return str(error)
        except _CallerGone:
            return "the checkpoint was not read to its end"
        return None

    def _count(self, nbytes: int) -> None:
        if self._abandoned:
            raise _CallerGone
        self._read_bytes += nbytes
