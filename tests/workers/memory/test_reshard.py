"""Resharding: a rank of a new mesh takes its state from memory checkpoints of another, over
sockets."""

from __future__ import annotations

import contextlib
import itertools
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from tests.support.faults.faulty_link import Direction, Fault, FaultType, FaultyLink
from tests.support.memory.mesh_layouts import (
    RANDOM,
    RANDOM_BYTES,
    Parameter,
    fill,
    layout_of,
    meshes,
)
from tests.support.memory.shm import SECRET
from tests.support.waiting import eventually

from holdfast_workers.errors import StaleCommand
from holdfast_workers.memory import box_transfer, reshard, wire
from holdfast_workers.memory.data_server import DataServer
from holdfast_workers.memory.fetch import SourceLost
from holdfast_workers.memory.reshard import EntryNotProvided, Reshard
from holdfast_workers.memory.segment import Commit, Segment
from holdfast_workers.memory.segment_store import Quarantined, SegmentStore, mesh_tag
from holdfast_workers.memory.wire import Timeouts
from holdfast_workers.protocol.messages import Held, Origin, Place, Restore, Tier
from holdfast_workers.state import digest
from holdfast_workers.state.digest import payload_digest
from holdfast_workers.state.layout import SMALL_STATE, StateLayout, TensorEntry, aligned
from holdfast_workers.state.object_room import packed, unpacked

QUICK = Timeouts(connect_s=1.0, handshake_s=1.0, stall_s=1.0, idle_s=30.0)
DEADLINE_S = 60.0
STEP, ATTEMPT = 7, 3
PARAMETERS = (
    Parameter("embed", (130, 64)),
    Parameter("up", (100, 70), tp_dim=0),
    Parameter("down", (90, 1100), tp_dim=1),
    Parameter("norm", (5,)),
)
OWN = {RANDOM: bytes(range(RANDOM_BYTES))}
RANKS_PER_NODE = 2


def random_state(seed: int = 1) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    found = {entry.name: random.standard_normal(entry.shape).astype("f4") for entry in PARAMETERS}
    return {**found, SMALL_STATE: np.frombuffer(random.bytes(128), np.uint8)}


def sized(**mesh: int) -> dict[str, int]:
    return {"dp_replicate": 1, "dp_shard": 1, "tp": 1, **mesh}


@dataclass
class Node:
    store: SegmentStore
    server: DataServer
    bad: list[Quarantined]


@dataclass
class MemoryCluster:
    """The memory checkpoints of an attempt on `mesh`, on several nodes: every rank's state, and a
    replica of it on the next node."""

    root: Path
    mesh: dict[str, int]
    nodes: dict[str, Node] = field(default_factory=dict)
    origins: list[Origin] = field(default_factory=list)

    def fill(self) -> MemoryCluster:
        ranks = math.prod(self.mesh.values())
        count = -(-ranks // RANKS_PER_NODE)
        for index in range(max(2, count)):
            self.start(f"n{index}")
        for rank in range(ranks):
            node_index = rank // RANKS_PER_NODE
            for place, node in (
                (Place.OWN, node_index),
                (Place.REPLICA, (node_index + 1) % len(self.nodes)),
            ):
                self.keep(rank, f"n{node}", place)
        return self

    def start(self, name: str) -> None:
        bad: list[Quarantined] = []
        store = SegmentStore(self.root / name, mesh_tag(self.mesh), on_quarantine=bad.append)
        server = DataServer(store, SECRET, "127.0.0.1", timeouts=QUICK)
        self.nodes[name] = Node(store, server, bad)

    def keep(self, rank: int, node: str, place: Place) -> None:
        layout = layout_of(PARAMETERS, self.mesh, rank)
        segment = self.nodes[node].store.ensure(rank, place, layout)
        slot = segment.begin(STEP)
        random = np.full(RANDOM_BYTES, 100 + rank, np.uint8)
        fill(slot, layout, {**random_state(), RANDOM: random})
        digest = payload_digest(slot)
        segment.commit(attempt=ATTEMPT, step=STEP, digest=digest)
        port = self.nodes[node].server.port
        self.origins.append(Origin(rank, node, place, "127.0.0.1", port, digest))

    def restore(self) -> Restore:
        return Restore(
            Tier.RESHARD,
            STEP,
            attempt=ATTEMPT,
            mesh=mesh_tag(self.mesh),
            origins=tuple(self.origins),
        )

    def segment(self, origin: Origin) -> Segment:
        found = self.nodes[origin.agent].store.find(origin.rank, origin.place)
        assert found is not None
        return found

    def reshard(
        self,
        mesh: dict[str, int],
        rank: int,
        node: str = "n0",
        from_rank: dict[str, bytes] = OWN,
        timeout_s: float = DEADLINE_S,
        on_connected: Callable[[object], None] = lambda _: None,
    ) -> tuple[Held, bytes]:
        """Reshard for a rank of `mesh` on `node`; returns the commit and its bytes."""
        store = self.nodes[node].store.for_mesh(mesh_tag(mesh))
        store.ensure(rank, Place.OWN, layout_of(PARAMETERS, mesh, rank))
        held = Reshard(
            SECRET, node, self.restore(), rank, store, timeouts=QUICK, on_connected=on_connected
        ).run(from_rank, timeout_s)
        segment = store.find(rank, Place.OWN)
        assert segment is not None
        commit = segment.find(ATTEMPT, STEP)
        assert commit is not None
        assert segment.verify(commit)
        return held, bytes(segment.payload(commit))

    def close(self) -> None:
        for node in self.nodes.values():
            node.server.close()


@pytest.fixture
def cluster_of(shm: Path) -> Iterator[Callable[..., MemoryCluster]]:
    clusters: list[MemoryCluster] = []

    def make(**mesh: int) -> MemoryCluster:
        clusters.append(MemoryCluster(shm / str(len(clusters)), sized(**mesh)).fill())
        return clusters[-1]

    before = threading.active_count()
    yield make
    for cluster in clusters:
        cluster.close()
    eventually(lambda: threading.active_count() <= before)


def expected(mesh: dict[str, int], rank: int) -> bytes:
    layout = layout_of(PARAMETERS, mesh, rank)
    payload = memoryview(bytearray(layout.payload_bytes))
    from_rank = {name: np.frombuffer(raw, np.uint8) for name, raw in OWN.items()}
    fill(payload, layout, {**random_state(), **from_rank})
    return bytes(payload)


def flip(segment: Segment) -> None:
    """Damage a tensor in memory through another mapping."""
    commit = segment.commits()[0]
    with Segment.open(segment.path) as mapped:
        mapped._slot(commit.slot)[segment.layout.tensors[0].offset] ^= 1


SAMPLE = list(itertools.permutations(list(meshes(8))[::6], 2))


@pytest.mark.parametrize(("old", "new"), SAMPLE, ids=str)
def test_every_rank_of_the_new_mesh_receives_its_part_of_the_same_state(
    cluster_of: Callable[..., MemoryCluster], old: dict[str, int], new: dict[str, int]
) -> None:
    cluster = cluster_of(**old)
    for rank in range(math.prod(new.values())):
        node = f"n{rank % len(cluster.nodes)}"
        held, payload = cluster.reshard(new, rank, node)
        assert payload == expected(new, rank)
        assert (held.mesh, held.step, held.attempt) == (mesh_tag(new), STEP, ATTEMPT)


def test_objects_have_the_room_that_they_have_at_the_source(
    cluster_of: Callable[..., MemoryCluster],
) -> None:
    """A function is called anew, so its objects are as small as when they were registered."""
    cluster = cluster_of(dp_shard=2)
    mesh, name = sized(dp_shard=2), "object.seen"
    raw = packed(b"grown " * 20)
    cluster.origins.clear()
    for rank in range(2):
        layout = _with_object(layout_of(PARAMETERS, mesh, rank), 256)
        segment = cluster.nodes["n0"].store.ensure(rank, Place.OWN, layout)
        slot = segment.begin(STEP)
        content = np.frombuffer(raw.ljust(256, b"\0"), np.uint8)
        fill(
            slot,
            layout,
            {**random_state(), RANDOM: np.zeros(RANDOM_BYTES, np.uint8), name: content},
        )
        digest = payload_digest(slot)
        segment.commit(attempt=ATTEMPT, step=STEP, digest=digest)
        port = cluster.nodes["n0"].server.port
        cluster.origins.append(Origin(rank, "n0", Place.OWN, "127.0.0.1", port, digest))
    for node in ("n0", "n1"):
        store = cluster.nodes[node].store.for_mesh(mesh_tag(sized()))
        store.ensure(0, Place.OWN, _with_object(layout_of(PARAMETERS, sized(), 0), 64))
        Reshard(SECRET, node, cluster.restore(), 0, store, timeouts=QUICK).run(OWN, DEADLINE_S)
        found = store.find(0, Place.OWN)
        assert found is not None
        (commit,) = found.commits()
        entry = found.layout.tensors[-1]
        assert found.verify(commit) and (entry.name, entry.nbytes) == (name, 256)
        assert unpacked(found.payload(commit)[entry.offset :]) == b"grown " * 20


def _with_object(layout: StateLayout, room: int) -> StateLayout:
    entry = TensorEntry("object.seen", "uint8", (room,), (0,), (room,), layout.payload_bytes, room)
    return StateLayout((*layout.tensors, entry), layout.payload_bytes + aligned(room))


def test_replicas_replace_a_lost_node(cluster_of: Callable[..., MemoryCluster]) -> None:
    cluster = cluster_of(dp_shard=4, tp=2)
    cluster.nodes["n2"].server.close()
    assert cluster.reshard(sized(tp=2), 1)[1] == expected(sized(tp=2), 1)


def test_a_replica_replaces_a_damaged_source(cluster_of: Callable[..., MemoryCluster]) -> None:
    cluster = cluster_of(dp_shard=4)
    for origin in cluster.origins:
        if origin.place is Place.OWN:
            flip(cluster.segment(origin))
    assert cluster.reshard(sized(), 0)[1] == expected(sized(), 0)
    assert sum(len(node.bad) for node in cluster.nodes.values()) > 0


def test_a_bit_flipped_in_transit_is_detected(cluster_of: Callable[..., MemoryCluster]) -> None:
    cluster = cluster_of(dp_shard=4)
    server_port = cluster.nodes["n1"].server.port
    flipping = FaultyLink(server_port, Fault(FaultType.FLIP, Direction.DOWN, 60_000))
    cluster.origins = [
        replace(origin, data_port=flipping.port) if origin.agent == "n1" else origin
        for origin in cluster.origins
        if origin.place is Place.OWN
    ]
    with pytest.raises(SourceLost, match="the bytes received differ"):
        cluster.reshard(sized(), 0)
    flipping.close()
    assert cluster.nodes["n0"].store.for_mesh(mesh_tag(sized())).held() == []


def test_entries_without_an_intact_source_are_named_and_nothing_is_committed(
    cluster_of: Callable[..., MemoryCluster],
) -> None:
    cluster = cluster_of(dp_shard=4)
    for origin in cluster.origins:
        if origin.rank == 2:
            flip(cluster.segment(origin))
    with pytest.raises(SourceLost, match=r"not covered.*damaged") as failed:
        cluster.reshard(sized(), 0)
    lost = {(origin.agent, origin.rank) for origin in failed.value.origins}
    assert {rank for _, rank in lost} == {2}
    assert len(lost) == 2, "its replica is lost too, and no other origin"
    assert cluster.nodes["n0"].store.for_mesh(mesh_tag(sized())).held() == []


def test_an_overwritten_commit_is_not_a_source(cluster_of: Callable[..., MemoryCluster]) -> None:
    cluster = cluster_of(dp_shard=2)
    for origin in cluster.origins:
        if origin.rank == 1:
            segment = cluster.segment(origin)
            for step in (STEP + 1, STEP + 2):
                segment.begin(step)
                segment.commit(attempt=ATTEMPT, step=step, digest="0" * 32)
    with pytest.raises(SourceLost, match="not_held"):
        cluster.reshard(sized(), 0)


def test_a_source_that_stops_answering_is_dropped_in_time(
    cluster_of: Callable[..., MemoryCluster],
) -> None:
    cluster = cluster_of(dp_shard=2, dp_replicate=2)
    silent = cluster.nodes["n1"].server
    silent._lock.acquire()  # it accepts connections and never serves them
    try:
        assert cluster.reshard(sized(), 0)[1] == expected(sized(), 0)
    finally:
        silent._lock.release()


@pytest.mark.seconds
def test_a_source_that_takes_a_request_and_stops_is_dropped_long_before_the_deadline(
    cluster_of: Callable[..., MemoryCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = cluster_of(dp_shard=6)
    asked, resumed = threading.Event(), threading.Event()

    def stop(*_request: object) -> bool:
        asked.set()
        return not resumed.wait(600.0)

    monkeypatch.setattr(cluster.nodes["n1"].store, "check_once", stop)
    try:
        assert cluster.reshard(sized(), 0, timeout_s=600.0)[1] == expected(sized(), 0)
    finally:
        resumed.set()
    assert asked.is_set()


def test_a_source_may_say_any_number_of_times_that_it_verifies(
    cluster_of: Callable[..., MemoryCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, check = cluster_of(dp_shard=4), SegmentStore.check_once
    cluster.origins = [origin for origin in cluster.origins if origin.place is Place.OWN]
    verified = []

    def slow(
        self: SegmentStore, rank: int, place: Place, commit: Commit, beat: Callable[[], object]
    ) -> bool:
        for _piece in range(10):
            beat()
        verified.append(rank)
        return check(self, rank, place, commit, beat)

    monkeypatch.setattr(SegmentStore, "check_once", slow)
    monkeypatch.setattr(box_transfer, "_BEATS_PER_STALL", 1e9)
    assert cluster.reshard(sized(), 0)[1] == expected(sized(), 0)
    assert {2, 3} <= set(verified)


def test_it_says_so_several_times_within_a_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    source, client = socket.socketpair()
    with source, client:
        beat = box_transfer.beat_to(source, stall_s=5.0)
        for tenth in range(1, 61):  # tenths of a second
            clock = 100.0 + tenth / 10
            beat()
        source.close()
        beats = 0
        with contextlib.suppress(wire.WireError):
            while wire.receive_header(client) == {"verifying": True}:
                beats += 1
    assert beats in (5, 6)


def test_a_fence_stops_a_reshard_before_its_commit(
    cluster_of: Callable[..., MemoryCluster],
) -> None:
    cluster = cluster_of(dp_shard=4)

    def fenced(sock: object) -> None:
        if sock is None:
            raise StaleCommand("attempt 1 has ended, 2 is on")

    with pytest.raises(StaleCommand):
        cluster.reshard(sized(), 0, on_connected=fenced)
    assert cluster.nodes["n0"].store.for_mesh(mesh_tag(sized())).held() == []


def test_a_fence_stops_a_reshard_between_two_pieces_of_a_read(
    cluster_of: Callable[..., MemoryCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fence is checked per piece, however large the sources and the resulting state are."""
    monkeypatch.setattr(digest, "PIECE_BYTES", 1 << 12)
    calls: list[object] = []
    cluster_of(dp_shard=2).reshard(sized(), 0, on_connected=calls.append)
    assert calls == [None] * len(calls), "all sources are on this node"
    read = 2 * len(expected(sized(), 0))
    assert len(calls) > read // digest.PIECE_BYTES

    def fenced(_: object) -> None:
        calls.pop()
        if not calls:
            raise StaleCommand("attempt 1 has ended, 2 is on")

    cluster = cluster_of(dp_shard=2)
    with pytest.raises(StaleCommand):
        cluster.reshard(sized(), 0, on_connected=fenced)
    assert cluster.nodes["n0"].store.for_mesh(mesh_tag(sized())).held() == []


def test_a_fence_that_rises_at_the_end_of_the_digest_prevents_the_commit(
    cluster_of: Callable[..., MemoryCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    risen = threading.Event()
    digest_of = digest.interruptible_digest

    def digest_then_fence(payload: memoryview, check_stop: Callable[[], object]) -> str:
        found = digest_of(payload, check_stop)
        risen.set()
        return found

    monkeypatch.setattr(reshard, "interruptible_digest", digest_then_fence)

    def fenced(_: object) -> None:
        if risen.is_set():
            raise StaleCommand("attempt 1 has ended, 2 is on")

    cluster = cluster_of(dp_shard=2)
    with pytest.raises(StaleCommand):
        cluster.reshard(sized(), 0, on_connected=fenced)
    assert cluster.nodes["n0"].store.for_mesh(mesh_tag(sized())).held() == []


def test_a_state_that_is_already_present_is_not_transferred_again(
    cluster_of: Callable[..., MemoryCluster],
) -> None:
    cluster = cluster_of(dp_shard=2)
    first = cluster.reshard(sized(), 0)
    for node in cluster.nodes.values():
        node.server.close()
    assert cluster.reshard(sized(), 0) == first


def test_a_rank_that_does_not_provide_its_own_entries_gets_no_state(
    cluster_of: Callable[..., MemoryCluster],
) -> None:
    with pytest.raises(EntryNotProvided, match=RANDOM):
        cluster_of(dp_shard=2).reshard(sized(), 0, from_rank={})


def test_a_rank_of_the_same_mesh_gets_its_own_random_state_back(
    cluster_of: Callable[..., MemoryCluster],
) -> None:
    """Its own copy is gone, so the state is assembled from the replicas of all ranks."""
    cluster = cluster_of(dp_shard=2, tp=2)
    cluster.origins = [origin for origin in cluster.origins if origin.place is Place.REPLICA]
    cluster.nodes["n0"].store.drop(1, Place.OWN)
    payload = cluster.reshard(cluster.mesh, 1, from_rank={})[1]
    with cluster.segment(cluster.origins[1]) as replica:
        assert payload == bytes(replica.payload(replica.commits()[0]))
