from __future__ import annotations

import socket
from pathlib import Path

from tests.support.memory.shm import MESH, SECRET

from holdfast_workers.memory import wire
from holdfast_workers.memory.data_server import DataServer
from holdfast_workers.memory.replicate import Replicator
from holdfast_workers.memory.segment_store import SegmentStore
from holdfast_workers.memory.wire import DEFAULT_TIMEOUTS, Role
from holdfast_workers.protocol.messages import Partner

LOWER_EFFORT = 1 << 2
FILLER = 1


def test_replication_uses_the_low_priority_traffic_class_and_restores_do_not(shm: Path) -> None:
    store = SegmentStore(shm, MESH)
    server = DataServer(store, SECRET, "127.0.0.1")
    replicator = Replicator(store, SECRET, lambda *_: None, lambda *_: None)
    push = replicator.dial(Partner("partner", "127.0.0.1", server.port))
    fetch = wire.connect(SECRET, "127.0.0.1", server.port, Role.FETCH, DEFAULT_TIMEOUTS)
    with push, fetch:
        assert traffic_class(push) == (LOWER_EFFORT, FILLER)
        assert traffic_class(fetch) == (0, 0)
    replicator.close()
    server.close()


def test_the_traffic_class_is_set_on_ipv6_too() -> None:
    with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as sock:
        wire.lower_priority(sock)
        marked = sock.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS)
        assert marked == LOWER_EFFORT


def traffic_class(sock: socket.socket) -> tuple[int, int]:
    return (
        sock.getsockopt(socket.IPPROTO_IP, socket.IP_TOS),
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY),
    )
