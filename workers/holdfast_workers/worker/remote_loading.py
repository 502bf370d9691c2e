"""Loads a checkpoint into a rank's payload, or a small object: from a folder in the rank's own
process, from a bucket through its agent.

A rank runs users' code, so it never has a bucket's credentials. For a bucket, the agent starts a
process without users' code (`child_programs/saver.py`), which fills memory that it shares with the
rank. Both ways raise the same errors.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from holdfast_workers.checkpoint.load import OtherRoom, load_whole_state
from holdfast_workers.checkpoint.manifest import (
    BadCheckpoint,
    CheckpointError,
    IncompatibleCheckpoint,
)
from holdfast_workers.checkpoint.open_storage import open_storage
from holdfast_workers.checkpoint.retention import quarantine
from holdfast_workers.checkpoint.storage import StorageError, TransientStorageError, local_folder
from holdfast_workers.fault_injection.failing_storage import with_injected_failures
from holdfast_workers.ipc import control_channel
from holdfast_workers.protocol.processes import (
    LoadOrder,
    LoadOutcome,
    LoadResult,
    StorageOptions,
)
from holdfast_workers.state.layout import StateLayout
from holdfast_workers.state.object_room import carry_over, with_rooms

RESTORE_ATTEMPTS = 1000
"""A rank has no other work meanwhile, so a job's own checkpoint is tried until `patience_s` is used
up."""


class LoadBuffer:
    """A rank's payload that a checkpoint is loaded into: in memory that can be shared if the
    checkpoint is in a bucket."""

    def __init__(self, uri: str, nbytes: int) -> None:
        self._nbytes = nbytes
        self._shared: int | None = None
        if local_folder(uri) is not None:
            self.payload = memoryview(bytearray(nbytes))
            return
        self._shared = os.memfd_create("holdfast-load", os.MFD_CLOEXEC)
        os.truncate(self._shared, nbytes)
        self.payload = memoryview(mmap.mmap(self._shared, nbytes))

    def load(
        self,
        order: LoadOrder,
        layout: StateLayout,
        fault_file: Path,
        ask: Callable[[LoadOrder], LoadOutcome],
    ) -> None:
        """Fill the payload. `ask` has the agent carry out an order, and returns its answer.

        Raises BadCheckpoint, another CheckpointError, StorageError.
        """
        if self._shared is None:
            fill(order, layout, self.payload, StorageOptions(), fault_file)
            return
        try:
            os.pwrite(self._shared, layout.to_json(), self._nbytes)
            path = f"/proc/{os.getpid()}/fd/{self._shared}"
            _check(ask(replace(order, memory=path, payload_bytes=self._nbytes)), order.uri)
        finally:
            os.close(self._shared)


def load_object(order: LoadOrder, ask: Callable[[LoadOrder], LoadOutcome]) -> bytes:
    """The object that an order names, of `payload_bytes` bytes; the caller verifies it. `ask` has
    the agent carry out an order. Raises StorageError."""
    if local_folder(order.uri) is not None:
        return open_storage(order.uri).read(order.object_name)
    shared = os.memfd_create("holdfast-load", os.MFD_CLOEXEC)
    try:
        os.truncate(shared, order.payload_bytes)
        path = f"/proc/{os.getpid()}/fd/{shared}"
        _check(ask(replace(order, memory=path)), order.uri)
        return os.pread(shared, order.payload_bytes, 0)
    finally:
        os.close(shared)


def load_with_room(
    load: Callable[[LoadBuffer, StateLayout], None],
    buffer: LoadBuffer,
    layout: StateLayout,
    uri: str,
) -> tuple[memoryview, StateLayout]:
    """Have `load` fill the buffer, which contains the live state, or a new one if objects have
    another room in the checkpoint; returns the filled payload and its layout."""
    try:
        load(buffer, layout)
        return buffer.payload, layout
    except OtherRoom as other:
        found = with_rooms(layout, other.rooms)
    again = LoadBuffer(uri, found.payload_bytes)
    carry_over(buffer.payload, layout, again.payload, found, objects=False)
    load(again, found)
    return again.payload, found


def fill_shared(order: LoadOrder, options: StorageOptions, fault_file: Path) -> LoadOutcome:
    """Carry out an order whose memory another process shares."""
    try:
        if order.object_name:
            content = open_storage(order.uri, options).read(order.object_name)
            with Path(order.memory).open("r+b") as file:
                file.write(content)
            return LoadOutcome(order.attempt, LoadResult.LOADED)
        with (
            Path(order.memory).open("r+b") as file,
            mmap.mmap(file.fileno(), 0) as memory,
            memoryview(memory) as whole,
            whole[: order.payload_bytes] as payload,
        ):
            layout = StateLayout.from_json(bytes(whole[order.payload_bytes :]))
            fill(order, layout, payload, options, fault_file)
    except BadCheckpoint as error:
        return _not_loaded(order, LoadResult.BAD, error.reason, error.uri)
    except OtherRoom as error:
        return replace(_not_loaded(order, LoadResult.OTHER_ROOM, str(error)), rooms=error.rooms)
    except CheckpointError as error:
        return _not_loaded(order, LoadResult.UNFIT, str(error))
    except StorageError as error:
        return _not_loaded(order, LoadResult.FAILED, error.reason, error.uri)
    return LoadOutcome(order.attempt, LoadResult.LOADED)


def _not_loaded(order: LoadOrder, result: LoadResult, reason: str, uri: str = "") -> LoadOutcome:
    return LoadOutcome(order.attempt, result, uri, control_channel.shorten_middle(reason))


def fill(
    order: LoadOrder,
    layout: StateLayout,
    payload: memoryview,
    options: StorageOptions,
    fault_file: Path,
) -> None:
    """Load into `payload`. Raises BadCheckpoint, another CheckpointError, StorageError."""
    if order.own:
        options = replace(options, attempts=RESTORE_ATTEMPTS)
    storage = open_storage(order.uri, options)
    if order.own:
        storage = with_injected_failures(storage, fault_file)
    try:
        load_whole_state(
            storage, layout, payload, mesh=order.mesh, rank=order.rank, exact=order.exact
        )
    except BadCheckpoint as error:
        if order.own:
            with contextlib.suppress(StorageError):  # a failing storage must not hide the cause
                quarantine(storage, str(error))
        raise


def _check(outcome: LoadOutcome, uri: str) -> None:
    """Raise the error that the process which loaded has met."""
    match outcome.result:
        case LoadResult.BAD:
            raise BadCheckpoint(outcome.uri, outcome.reason)
        case LoadResult.OTHER_ROOM:
            raise OtherRoom(outcome.rooms)
        case LoadResult.UNFIT:
            raise IncompatibleCheckpoint(outcome.reason)
        case LoadResult.FAILED:
            raise TransientStorageError(outcome.uri or uri, outcome.reason)
