from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.memory.shm import MESH, layout_of, write

from holdfast_workers.memory.segment import Commit, Segment, SegmentSpaceError
from holdfast_workers.memory.segment_store import (
    NothingHeld,
    Quarantined,
    SegmentBusy,
    SegmentStore,
)
from holdfast_workers.protocol.messages import Place
from holdfast_workers.state.layout import StateLayout

NBYTES = 50_000


def _held(store: SegmentStore, *, verified: bool = False) -> list[tuple[int, str, int]]:
    return [(held.rank, held.place.value, held.step) for held in store.held(verified=verified)]


def test_commits_of_a_worker_are_held_and_survive_the_agent(shm: Path) -> None:
    store = SegmentStore(shm, MESH)
    worker = Segment.create(store.path(3, Place.OWN), layout_of(NBYTES))
    write(worker, 1, 1)
    write(worker, 1, 2)
    write(store.ensure(1, Place.REPLICA, layout_of(NBYTES)), 1, 2)
    expected = [(1, "replica", 2), (3, "own", 2), (3, "own", 1)]
    assert _held(store) == expected
    store.close()
    again = SegmentStore(shm, MESH)
    assert _held(again, verified=True) == expected
    assert again.held()[0].mesh == MESH
    write(worker, 1, 3)
    assert (3, "own", 3) in _held(again)


def test_a_segment_replaced_by_its_worker_is_mapped_again(shm: Path) -> None:
    store = SegmentStore(shm, MESH)
    write(store.ensure(0, Place.OWN, layout_of(NBYTES)), 1, 1)
    assert _held(store) == [(0, "own", 1)]
    write(Segment.create(store.path(0, Place.OWN), layout_of(2 * NBYTES)), 2, 5)
    assert [(held.step, held.nbytes) for held in store.held()] == [(5, 2 * NBYTES)]


def test_ensure_keeps_what_fits_and_replaces_what_does_not(shm: Path) -> None:
    store = SegmentStore(shm, MESH)
    write(store.ensure(0, Place.OWN, layout_of(NBYTES)), 1, 1)
    assert store.ensure(0, Place.OWN, layout_of(NBYTES)).commits()
    assert store.ensure(0, Place.OWN, layout_of(NBYTES + 1)).commits() == []


def test_a_replica_without_room_for_two_gives_way_to_the_one_that_is_needed(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = Segment.create

    def create_one(path: Path, layout: StateLayout) -> Segment:
        if any(shm.glob("*/*.seg")):
            raise SegmentSpaceError("full")
        return create(path, layout)

    store = SegmentStore(shm, MESH)
    write(store.ensure(0, Place.REPLICA, layout_of(NBYTES)), 1, 1)
    monkeypatch.setattr(Segment, "create", create_one)
    assert store.prepare_replica(0, layout_of(2 * NBYTES))
    segment = store.replica_of_size(0, 2 * NBYTES)
    assert segment is not None and segment.file_exists
    assert _held(store) == []


def test_a_flipped_byte_is_quarantined_and_the_older_state_remains(shm: Path) -> None:
    bad: list[Quarantined] = []
    store = SegmentStore(shm, MESH, on_quarantine=bad.append)
    segment = store.ensure(0, Place.OWN, layout_of(NBYTES))
    write(segment, 1, 1)
    newest = write(segment, 1, 2)
    segment._slot(newest.slot)[17] ^= 0x40
    assert _held(store) == [(0, "own", 2), (0, "own", 1)]
    assert _held(store, verified=True) == [(0, "own", 1)]
    assert [(found.rank, found.attempt, found.step) for found in bad] == [(0, 1, 2)]
    assert _held(store) == [(0, "own", 1)]
    assert _held(store, verified=True) == [(0, "own", 1)]
    assert len(bad) == 1


def test_a_damaged_file_is_set_aside_and_reported(shm: Path) -> None:
    bad: list[Quarantined] = []
    store = SegmentStore(shm, MESH, on_quarantine=bad.append)
    path = store.path(0, Place.OWN)
    Segment.create(path, layout_of(NBYTES)).close()
    path.write_bytes(b"no segment" * 1000)
    assert store.held() == []
    assert (bad[0].rank, bad[0].step) == (0, None)
    assert not path.exists()
    assert path.with_suffix(".bad").exists()


def test_a_replica_is_adopted_without_a_copy(shm: Path) -> None:
    store = SegmentStore(shm, MESH)
    replica = store.ensure(2, Place.REPLICA, layout_of(NBYTES))
    write(replica, 1, 7)
    inode = store.path(2, Place.REPLICA).stat().st_ino
    write(store.ensure(2, Place.OWN, layout_of(NBYTES)), 1, 3)
    store.adopt(2)
    assert _held(store, verified=True) == [(2, "own", 7)]
    assert store.path(2, Place.OWN).stat().st_ino == inode
    with pytest.raises(NothingHeld):
        store.adopt(2)


def test_adoption_waits_for_a_push_but_not_for_ever(shm: Path) -> None:
    store = SegmentStore(shm, MESH, busy_timeout_s=0.05)
    store.ensure(2, Place.REPLICA, layout_of(NBYTES))
    with store.writing(2, Place.REPLICA), pytest.raises(SegmentBusy):
        store.adopt(2)
    store.adopt(2)


def test_free_all_frees_every_segment(shm: Path) -> None:
    store = SegmentStore(shm, MESH)
    for rank in range(3):
        write(store.ensure(rank, Place.OWN, layout_of(NBYTES)), 1, 1)
    store.drop(1, Place.OWN)
    store.drop(1, Place.OWN)
    assert [held.rank for held in store.held()] == [0, 2]
    store.free_all()
    assert list(shm.iterdir()) == []


def test_segments_of_other_meshes_are_freed_and_this_mesh_stays(shm: Path) -> None:
    write(SegmentStore(shm, "tp=4").ensure(0, Place.OWN, layout_of(NBYTES)), 1, 1)
    store = SegmentStore(shm, MESH)
    write(store.ensure(0, Place.OWN, layout_of(NBYTES)), 2, 1)
    assert store.meshes() == sorted([MESH, "tp=4"])
    assert store.for_mesh("tp=4").for_mesh(MESH) is store
    store.free_others()
    assert (store.meshes(), store.for_mesh("tp=4").held()) == ([MESH], [])
    assert [held.attempt for held in store.held()] == [2]


def test_a_verified_payload_is_not_read_again_until_its_commit_word_changes(shm: Path) -> None:
    store = SegmentStore(shm, MESH)
    segment = store.ensure(0, Place.OWN, layout_of(NBYTES))
    first = write(segment, 1, 1)
    assert store.check_once(0, Place.OWN, first)
    damage(segment, first)
    assert store.check_once(0, Place.OWN, first)
    assert not store.check(0, Place.OWN, first)
    second = write(segment, 1, 2)
    damage(segment, second)
    assert not store.check_once(0, Place.OWN, second)


@pytest.fixture
def frequent_thread_switches() -> Iterator[None]:
    """Threads switch so often that any two of their steps interleave."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("frequent_thread_switches")
def test_a_check_survives_a_concurrent_unmap(shm: Path) -> None:
    store = SegmentStore(shm, MESH)
    commit = write(store.ensure(0, Place.OWN, layout_of(NBYTES)), 1, 1)
    done = threading.Event()

    def unmap() -> None:
        while not done.is_set():
            store.close()

    other = threading.Thread(target=unmap)
    other.start()
    try:
        assert all(store.check_once(0, Place.OWN, commit) for _ in range(1000))
    finally:
        done.set()
        other.join()


def damage(segment: Segment, commit: Commit) -> None:
    """Flip a byte of the payload directly in the file."""
    start = bytes(segment.payload(commit)[:64])
    raw = segment.path.read_bytes()
    with segment.path.open("r+b") as file:
        file.seek(raw.index(start))
        file.write(bytes([start[0] ^ 1]))


def test_keep_only_frees_unneeded_segments_and_waits_for_writers(shm: Path) -> None:
    store = SegmentStore(shm, MESH, busy_timeout_s=0.05)
    for rank in range(3):
        for place in Place:
            write(store.ensure(rank, place, layout_of(NBYTES)), 1, 1)
    with store.writing(2, Place.REPLICA):
        store.keep_only({0}, {1})
    held = {(commit.rank, commit.place) for commit in store.held()}
    assert held == {(0, Place.OWN), (1, Place.REPLICA), (2, Place.REPLICA)}
    store.keep_only({0}, {1})
    assert {(commit.rank, commit.place) for commit in store.held()} == held - {(2, Place.REPLICA)}


@pytest.mark.parametrize("mesh", ["../elsewhere", "..", ".", ""])
def test_a_mesh_tag_cannot_leave_the_folder(shm: Path, mesh: str) -> None:
    with pytest.raises(ValueError, match="folder"):
        SegmentStore(shm, mesh)


def test_the_memory_tier_imports_no_torch() -> None:
    code = (
        "import sys, holdfast_workers.memory.replicate, holdfast_workers.memory.data_server, "
        "holdfast_workers.memory.lifeline; assert 'torch' not in sys.modules; "
        "assert 'ray' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
