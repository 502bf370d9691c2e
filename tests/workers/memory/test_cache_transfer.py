"""The files of a node's cache over its data channel."""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.support.memory.data_nodes import QUICK
from tests.support.memory.shm import SECRET
from tests.support.waiting import eventually

from holdfast_workers.memory import wire
from holdfast_workers.memory.cache_transfer import CacheUnreachable, NotCached, RemoteCache
from holdfast_workers.memory.data_server import DataServer
from holdfast_workers.memory.segment_store import SegmentStore
from holdfast_workers.memory.wire import Role
from holdfast_workers.protocol.messages import Partner


class ServingNode:
    """A node whose cache others may read."""

    def __init__(self, folder: Path) -> None:
        self.cache = folder / "cache"
        self.cache.mkdir()
        memory = SegmentStore(folder / "memory", "tp=1")
        self.server = DataServer(memory, SECRET, "127.0.0.1", cache_dir=self.cache)
        self.partner = Partner("n0", "127.0.0.1", self.server.port)


@pytest.fixture
def own(tmp_path: Path) -> Iterator[ServingNode]:
    node = ServingNode(tmp_path)
    yield node
    node.server.close()


@pytest.mark.parametrize(
    "name",
    [
        "../secret",
        "shard-" + "../" * 10 + "xx.bin",
        "fetch-" + "0" * 32 + ".json",
        "source-" + "0" * 32 + ".json",
        "shard-" + "0" * 32 + ".bin\n",
        "",
    ],
)
def test_no_other_file_is_served(own: ServingNode, tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_bytes(b"key")
    for other in ("fetch-" + "0" * 32 + ".json", "source-" + "0" * 32 + ".json"):
        (own.cache / other).write_bytes(b"reason")
    cache = RemoteCache(SECRET, own.partner)
    assert cache.which([name]) == set()
    with pytest.raises(NotCached), cache.open(name):
        pass
    there = "shard-" + "1" * 32 + ".bin"
    (own.cache / there).write_bytes(b"tokens")
    assert cache.which([name, there]) == {there}, "a refusal ends no connection"
    for make in (Path.mkdir, os.mkfifo, partial(Path.symlink_to, target=tmp_path / "secret")):
        path = own.cache / f"shard-{uuid.uuid4().hex}.bin"
        make(path)
        with pytest.raises(NotCached), cache.open(path.name):
            pass
    cache.close()


def test_a_file_that_is_cut_while_it_is_sent_ends_the_connection_only(
    own: ServingNode,
) -> None:
    name = "shard-" + "1" * 32 + ".bin"
    nbytes = 64 << 20
    with (own.cache / name).open("wb") as file:
        file.truncate(nbytes)
    cache = RemoteCache(SECRET, own.partner, timeouts=QUICK)
    with cache.open(name) as reader:
        os.truncate(own.cache / name, 1 << 20)
        piece = memoryview(bytearray(4 << 20))
        with pytest.raises(CacheUnreachable, match="n0"):
            while reader.readinto(piece):
                pass
    (own.cache / name).write_bytes(b"tokens")
    with cache.open(name) as reader:
        assert reader.readinto(piece) == 6
    cache.close()


def test_a_reader_that_stops_half_way_reads_the_next_file_whole(
    own: ServingNode,
) -> None:
    names = ["shard-" + str(n) * 32 + ".bin" for n in range(2)]
    for n, name in enumerate(names):
        (own.cache / name).write_bytes(bytes([n]) * 10_000_000)
    cache = RemoteCache(SECRET, own.partner)
    piece = bytearray(10_000_001)
    with cache.open(names[0]) as reader:
        reader.readinto(memoryview(piece)[:5])
    with cache.open(names[1]) as reader:
        assert reader.readinto(memoryview(piece)) == 10_000_000
        assert reader.readinto(memoryview(piece)) == 0
    assert set(piece[:10_000_000]) == {1}
    cache.close()


def test_a_connection_that_ended_while_idle_is_made_anew(
    own: ServingNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, roles = RemoteCache(SECRET, own.partner), []
    connect = wire.connect

    def counted(secret: bytes, host: str, port: int, role: Role, *rest: Any, **more: Any) -> Any:
        roles.append(role)
        return connect(secret, host, port, role, *rest, **more)

    monkeypatch.setattr(wire, "connect", counted)
    for _ in range(3):
        cache.which([])
    assert roles == [Role.CACHE]
    for sock in [*own.server._connections]:
        wire.shut(sock)
    eventually(lambda: not own.server._connections)
    assert cache.which([]) == set()
    assert roles == [Role.CACHE] * 2
    cache.close()


def test_shards_give_way_to_collectives(own: ServingNode) -> None:
    cache = RemoteCache(SECRET, own.partner)
    cache.which([])
    (sent_by,) = own.server._connections
    assert sent_by.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY) == 1
    cache.close()


def test_a_node_that_trickles_has_failed(own: ServingNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although it never stops for long."""
    name = "shard-" + "1" * 32 + ".bin"
    (own.cache / name).write_bytes(bytes(1000))
    original = wire.send_payload

    def trickle(sock: socket.socket, payload: bytes, *rest: Any) -> None:
        for byte in payload:
            time.sleep(0.1)
            original(sock, bytes([byte]), *rest)

    monkeypatch.setattr(wire, "send_payload", trickle)
    cache = RemoteCache(SECRET, own.partner, timeouts=QUICK)
    with cache.open(name) as reader, pytest.raises(CacheUnreachable):
        reader.read_all(1000)
    assert reader.left == 1000
