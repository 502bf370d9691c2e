"""A rank of a new mesh takes its state from what ranks of another have in memory, over sockets."""

from __future__ import annotations

import contextlib
import itertools
import math
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from benchmarks.mesh_layouts import RANDOM, RANDOM_BYTES, Parameter, fill, layout_of, meshes
from tests.support.memory.shm import SECRET
from tests.support.waiting import eventually

from holdfast_workers.errors import StaleCommand
from holdfast_workers.memory import wire
from holdfast_workers.memory.data_server import DataServer
from holdfast_workers.memory.fetch import SourceLost
from holdfast_workers.memory.reshard import NotGiven, Reshard
from holdfast_workers.memory.segment import Segment
from holdfast_workers.memory.segment_store import Quarantined, SegmentStore, mesh_tag
from holdfast_workers.memory.wire import Timeouts
from holdfast_workers.protocol.messages import Held, Origin, Place, Restore, Tier
from holdfast_workers.state import digest
from holdfast_workers.state.digest import payload_digest
from holdfast_workers.state.layout import SMALL_STATE

QUICK = Timeouts(connect_s=1.0, handshake_s=1.0, stall_s=1.0, idle_s=30.0)
DEADLINE_S = 20.0
STEP, ATTEMPT = 7, 3
PARAMETERS = (
    Parameter("embed", (130, 64)),
    Parameter("up", (100, 70), tp_dim=0),
    Parameter("down", (90, 1100), tp_dim=1),
    Parameter("norm", (5,)),
)
OWN = {RANDOM: bytes(range(RANDOM_BYTES))}
RANKS_PER_NODE = 2


def a_state(seed: int = 1) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    found = {one.name: random.standard_normal(one.shape).astype("f4") for one in PARAMETERS}
    return {**found, SMALL_STATE: np.frombuffer(random.bytes(128), np.uint8)}


def sized(**mesh: int) -> dict[str, int]:
    return {"dp_replicate": 1, "dp_shard": 1, "tp": 1, **mesh}


@dataclass
class Node:
    store: SegmentStore
    server: DataServer
    bad: list[Quarantined]


@dataclass
class World:
    """What is left in the memory of some nodes by an attempt on `mesh`: every rank's state, and a
    replica of it on the next node."""

    root: Path
    mesh: dict[str, int]
    nodes: dict[str, Node] = field(default_factory=dict)
    origins: list[Origin] = field(default_factory=list)

    def fill(self) -> World:
        ranks = math.prod(self.mesh.values())
        count = -(-ranks // RANKS_PER_NODE)
        for index in range(max(2, count)):
            self.start(f"n{index}")
        for rank in range(ranks):
            home = rank // RANKS_PER_NODE
            for place, node in ((Place.OWN, home), (Place.REPLICA, (home + 1) % len(self.nodes))):
                self.keep(rank, f"n{node}", place)
        return self

    def start(self, name: str) -> None:
        bad: list[Quarantined] = []
        store = SegmentStore(self.root / name, mesh_tag(self.mesh), on_bad=bad.append)
        server = DataServer(store, SECRET, "127.0.0.1", timeouts=QUICK)
        self.nodes[name] = Node(store, server, bad)

    def keep(self, rank: int, node: str, place: Place) -> None:
        layout = layout_of(PARAMETERS, self.mesh, rank)
        segment = self.nodes[node].store.ensure(rank, place, layout)
        slot = segment.begin(STEP)
        random = np.full(RANDOM_BYTES, 100 + rank, np.uint8)
        fill(slot, layout, {**a_state(), RANDOM: random})
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

    def bring(
        self,
        mesh: dict[str, int],
        rank: int,
        node: str = "n0",
        own: dict[str, bytes] = OWN,
        timeout_s: float = DEADLINE_S,
        on_connected: Callable[[object], None] = lambda _: None,
    ) -> tuple[Held, bytes]:
        """As a rank of `mesh` on `node` does it: what was committed, and its bytes."""
        store = self.nodes[node].store.of(mesh_tag(mesh))
        store.ensure(rank, Place.OWN, layout_of(PARAMETERS, mesh, rank))
        held = Reshard(
            SECRET, node, self.restore(), rank, store, timeouts=QUICK, on_connected=on_connected
        ).run(own, timeout_s)
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
def world(shm: Path) -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def make(**mesh: int) -> World:
        worlds.append(World(shm / str(len(worlds)), sized(**mesh)).fill())
        return worlds[-1]

    before = threading.active_count()
    yield make
    for one in worlds:
        one.close()
    eventually(lambda: threading.active_count() <= before)


def expected(mesh: dict[str, int], rank: int) -> bytes:
    layout = layout_of(PARAMETERS, mesh, rank)
    payload = memoryview(bytearray(layout.payload_bytes))
    own = {name: np.frombuffer(raw, np.uint8) for name, raw in OWN.items()}
    fill(payload, layout, {**a_state(), **own})
    return bytes(payload)


def flip(segment: Segment) -> None:
    """Damage a tensor in memory, behind everybody's back."""
    commit = segment.commits()[0]
    with Segment.open(segment.path) as again:
        again._slot(commit.slot)[segment.layout.tensors[0].offset] ^= 1


SAMPLE = list(itertools.permutations(list(meshes(8))[::6], 2))


@pytest.mark.parametrize(("old", "new"), SAMPLE, ids=str)
def test_every_rank_of_the_new_mesh_has_its_part_of_the_same_state(
    world: Callable[..., World], old: dict[str, int], new: dict[str, int]
) -> None:
    there = world(**old)
    for rank in range(math.prod(new.values())):
        node = f"n{rank % len(there.nodes)}"
        held, payload = there.bring(new, rank, node)
        assert payload == expected(new, rank)
        assert (held.mesh, held.step, held.attempt) == (mesh_tag(new), STEP, ATTEMPT)


def test_a_lost_node_is_made_up_for_by_replicas(world: Callable[..., World]) -> None:
    there = world(dp_shard=4, tp=2)
    there.nodes["n2"].server.close()
    assert there.bring(sized(tp=2), 1)[1] == expected(sized(tp=2), 1)


def test_a_damaged_source_gives_nothing_and_its_replica_does(world: Callable[..., World]) -> None:
    there = world(dp_shard=4)
    for origin in there.origins:
        if origin.place is Place.OWN:
            flip(there.segment(origin))
    assert there.bring(sized(), 0)[1] == expected(sized(), 0)
    assert sum(len(node.bad) for node in there.nodes.values()) > 0


class Flipping:
    """A way to a server that changes one bit of what comes back, `after` so many bytes."""

    def __init__(self, port: int, after: int) -> None:
        self._server, self._after = port, after
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._door.getsockname()[1])
        threading.Thread(target=self._run, daemon=True).start()

    def close(self) -> None:
        wire.shut(self._door)
        self._door.close()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            client, _ = self._door.accept()
            with client, socket.create_connection(("127.0.0.1", self._server)) as server:
                back = threading.Thread(target=self._back, args=(server, client), daemon=True)
                back.start()
                while piece := client.recv(1 << 16):
                    server.sendall(piece)
                wire.shut(server)
                back.join()

    def _back(self, server: socket.socket, client: socket.socket) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while piece := bytearray(server.recv(1 << 16)):
                if passed <= self._after < passed + len(piece):
                    piece[self._after - passed] ^= 4
                passed += len(piece)
                client.sendall(piece)


def test_a_bit_that_changes_on_the_way_is_not_believed(world: Callable[..., World]) -> None:
    there = world(dp_shard=4)
    honest = there.nodes["n1"].server.port
    bent = Flipping(honest, after=60_000)
    there.origins = [
        replace(one, data_port=bent.port) if one.agent == "n1" else one
        for one in there.origins
        if one.place is Place.OWN
    ]
    with pytest.raises(SourceLost, match="other bytes arrived"):
        there.bring(sized(), 0)
    bent.close()
    assert there.nodes["n0"].store.of(mesh_tag(sized())).held() == []


def test_what_no_good_source_holds_is_named_and_nothing_is_committed(
    world: Callable[..., World],
) -> None:
    there = world(dp_shard=4)
    for origin in there.origins:
        if origin.rank == 2:
            flip(there.segment(origin))
    with pytest.raises(SourceLost, match=r"not covered.*damaged") as failed:
        there.bring(sized(), 0)
    lost = {(one.agent, one.rank) for one in failed.value.origins}
    assert {rank for _, rank in lost} == {2}
    assert len(lost) == 2, "the replica of it too, and nothing else"
    assert there.nodes["n0"].store.of(mesh_tag(sized())).held() == []


def test_a_commit_that_was_overwritten_is_no_source(world: Callable[..., World]) -> None:
    there = world(dp_shard=2)
    for origin in there.origins:
        if origin.rank == 1:
            segment = there.segment(origin)
            for step in (STEP + 1, STEP + 2):
                segment.begin(step)
                segment.commit(attempt=ATTEMPT, step=step, digest="0" * 32)
    with pytest.raises(SourceLost, match="not_held"):
        there.bring(sized(), 0)


def test_a_source_that_answers_no_more_is_given_up_in_time(world: Callable[..., World]) -> None:
    there = world(dp_shard=2, dp_replicate=2)
    silent = there.nodes["n1"].server
    silent._lock.acquire()  # it takes connections, and never serves them
    try:
        assert there.bring(sized(), 0)[1] == expected(sized(), 0)
    finally:
        silent._lock.release()


def test_a_fence_is_heard_before_anything_is_committed(world: Callable[..., World]) -> None:
    there = world(dp_shard=4)

    def fenced(sock: object) -> None:
        if sock is None:
            raise StaleCommand("attempt 1 has ended, 2 is on")

    with pytest.raises(StaleCommand):
        there.bring(sized(), 0, on_connected=fenced)
    assert there.nodes["n0"].store.of(mesh_tag(sized())).held() == []


def test_a_fence_is_heard_between_any_two_pieces_of_what_is_read(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However large the sources are, and the state that was made of them."""
    monkeypatch.setattr(digest, "PIECE_BYTES", 1 << 12)
    looks: list[object] = []
    world(dp_shard=2).bring(sized(), 0, on_connected=looks.append)
    assert looks == [None] * len(looks), "all of it lies on this node"
    read = 2 * len(expected(sized(), 0))
    assert len(looks) > read // digest.PIECE_BYTES

    def fenced(_: object) -> None:
        looks.pop()
        if not looks:
            raise StaleCommand("attempt 1 has ended, 2 is on")

    there = world(dp_shard=2)
    with pytest.raises(StaleCommand):
        there.bring(sized(), 0, on_connected=fenced)
    assert there.nodes["n0"].store.of(mesh_tag(sized())).held() == []


def test_what_lies_there_already_is_not_moved_again(world: Callable[..., World]) -> None:
    there = world(dp_shard=2)
    first = there.bring(sized(), 0)
    for node in there.nodes.values():
        node.server.close()
    assert there.bring(sized(), 0) == first


def test_a_rank_that_does_not_give_its_own_state_gets_none(world: Callable[..., World]) -> None:
    with pytest.raises(NotGiven, match=RANDOM):
        world(dp_shard=2).bring(sized(), 0, own={})


def test_a_rank_of_the_same_mesh_gets_its_own_random_state_back(
    world: Callable[..., World],
) -> None:
    """Its own copy is gone, so the state is put together again from replicas of all ranks."""
    there = world(dp_shard=2, tp=2)
    there.origins = [one for one in there.origins if one.place is Place.REPLICA]
    there.nodes["n0"].store.drop(1, Place.OWN)
    payload = there.bring(there.mesh, 1, own={})[1]
    with there.segment(there.origins[1]) as replica:
        assert payload == bytes(replica.payload(replica.commits()[0]))
