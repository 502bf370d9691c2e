"""A checkpoint whose objects have another room than the rank's is loaded, from a folder and through
another process."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.workers.state.test_object_room import payload_of, state_of

from holdfast_workers.checkpoint.manifest import checkpoint_folder
from holdfast_workers.checkpoint.open_storage import open_storage
from holdfast_workers.checkpoint.publish import finalize
from holdfast_workers.checkpoint.shards import save_shard
from holdfast_workers.fault_injection.fault_points import FaultPoints
from holdfast_workers.protocol.processes import LoadOrder, LoadOutcome, LoadResult, StorageOptions
from holdfast_workers.state.layout import StateLayout
from holdfast_workers.state.object_room import rooms
from holdfast_workers.worker import remote_loading
from holdfast_workers.worker.main import WorkerLink
from holdfast_workers.worker.remote_loading import LoadBuffer, fill_shared, load_with_room

MESH = {"dp_shard": 1, "tp": 1}
NOWHERE = Path("/nowhere")
SAVED = state_of(b"grown " * 20, 256, weights=3.0)


@pytest.fixture
def uri(tmp_path: Path) -> str:
    checkpoint = open_storage(str(tmp_path)).below(checkpoint_folder(7, 1))
    record = save_shard(checkpoint, payload_of(SAVED), SAVED.layout, 0, 1, 7)
    finalize(checkpoint, [record], MESH, {})
    return checkpoint.uri


@pytest.mark.parametrize("room", [64, 256, 1024])
@pytest.mark.parametrize("shared", [False, True])
def test_objects_have_the_room_that_they_have_in_the_checkpoint(
    uri: str, room: int, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[LoadResult] = []

    def ask(order: LoadOrder) -> LoadOutcome:
        outcome = fill_shared(order, StorageOptions(), NOWHERE)
        asked.append(outcome.result)
        return outcome

    def load(buffer: LoadBuffer, layout: StateLayout) -> None:
        buffer.load(LoadOrder(1, 0, uri, MESH, own=True), layout, NOWHERE, ask)

    if shared:  # as for a bucket
        monkeypatch.setattr(remote_loading, "local_folder", lambda uri: None)
    here = state_of(b"new", room)
    buffer = LoadBuffer(uri, here.layout.payload_bytes)
    buffer.payload[:] = payload_of(here)
    payload, layout = load_with_room(load, buffer, here.layout, uri)
    assert bytes(payload) == bytes(payload_of(SAVED))
    assert layout == SAVED.layout and rooms(layout) == {"object.seen": 256}
    first = [] if room == 256 else [LoadResult.OTHER_ROOM]
    assert asked == ([*first, LoadResult.LOADED] if shared else [])


def test_a_second_load_of_an_attempt_waits_for_its_own_outcome() -> None:
    link = WorkerLink(None, FaultPoints(None))  # type: ignore[arg-type]
    late = "the checkpoint was not loaded within 0.0 s"
    link._handle(LoadOutcome(4, LoadResult.OTHER_ROOM, number=1))
    assert link.wait_load(4, 1, 0.0).result is LoadResult.OTHER_ROOM
    assert link.wait_load(4, 2, 0.0).reason == late
    link._handle(LoadOutcome(4, LoadResult.BAD, number=2))
    assert link.wait_load(4, 3, 0.0).reason == late
    link._handle(LoadOutcome(4, LoadResult.LOADED, number=4))
    link._handle(LoadOutcome(4, LoadResult.BAD, number=3))
    assert link.wait_load(4, 4, 0.0).result is LoadResult.LOADED
