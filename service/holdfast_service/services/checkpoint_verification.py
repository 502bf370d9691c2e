"""Reads a checkpoint through, byte for byte, and says meanwhile how far it is.

It ends when it is done, when the storage is silent for too long, or soon after nobody listens any
more. Only its last word says what the checkpoint is worth.
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

_PAUSE_S = 0.25  # between two words to whoever listens


class _NobodyListens(Exception):
    pass


class Verification:
    def __init__(self, at: Storage, checkpoint: Checkpoint) -> None:
        self._at = at
        self._checkpoint = checkpoint
        self._read_bytes = 0
        self._abandoned = False

    async def progress(
        self, storages: StorageCalls, silence_s: float
    ) -> AsyncGenerator[VerificationView, None]:
        """The last word has `done`, or a `problem`: then nothing is known."""
        reading = storages.start_reading(self._read)
        last, since = -1, time.monotonic()
        try:
            while not reading.done():
                await asyncio.wait({reading}, timeout=_PAUSE_S)
                now, read_bytes = time.monotonic(), self._read_bytes
                if read_bytes != last:
                    last, since = read_bytes, now
                    yield self._word()
                elif now - since > silence_s:
                    yield self._word(problem=f"no byte came in {silence_s:g} s")
                    return
            try:
                yield self._word(done=True, bad=reading.result())
            except StorageError as error:
                yield self._word(problem=str(error))
        finally:
            self._abandoned = True

    def _word(
        self, *, done: bool = False, bad: str | None = None, problem: str | None = None
    ) -> VerificationView:
        return VerificationView(
            step=self._checkpoint.step,
            attempt=self._checkpoint.attempt,
            read_bytes=self._read_bytes,
            nbytes=self._checkpoint.nbytes,
            done=done,
            bad=bad,
            problem=problem,
        )

    def _read(self) -> str | None:
        """In a thread: what is wrong with it, or None."""
        try:
            verify(self._at, self._count)
        except BadCheckpoint as error:
            if MANIFEST not in self._at.objects():  # nothing is told of what is not there
                raise StorageError(self._at.uri, "it was removed meanwhile") from error
            return str(error)
        except _NobodyListens:
            return "it was not read to its end"
        return None

    def _count(self, nbytes: int) -> None:
        if self._abandoned:
            raise _NobodyListens
        self._read_bytes += nbytes
