"""Fetching the commit of one rank from the node agent that holds it.

A fetch ends with a verified commit in the node's own segment of the rank, or raises.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import replace

import xxhash

from holdfast_workers.errors import WorkersError
from holdfast_workers.memory import wire
from holdfast_workers.memory.peer_tls import PeerTls
from holdfast_workers.memory.segment import Commit
from holdfast_workers.memory.segment_store import SegmentStore
from holdfast_workers.memory.wire import DEFAULT_TIMEOUTS, Role, Timeouts, WireError
from holdfast_workers.protocol.messages import Held, Origin, Place, Restore


class BadShard(WorkersError):
    """The bytes received do not have the announced digest."""


class SourceLost(WorkersError):
    """The source cannot be reached, died during the transfer, or no longer holds the commit."""

    def __init__(self, message: str, origins: tuple[Origin, ...] = ()) -> None:
        super().__init__(message)
        self.origins = origins
        """The sources that failed, where there are several."""


def fetch(
    secret: bytes,
    source: Restore,
    rank: int,
    store: SegmentStore,
    timeout_s: float,
    *,
    timeouts: Timeouts = DEFAULT_TIMEOUTS,
    on_connected: Callable[[socket.socket], None] = lambda _: None,
    tls: PeerTls | None = None,
) -> Held:
    """Fetch the commit that `source` names into this node's own segment of `rank`, and verify it.

    Takes at most `timeout_s` in total. Transfers nothing if the commit is already present. Raises
    BadShard, SourceLost, or a SegmentError (no space, or busy). `on_connected(sock)` is called
    before the segment is touched: shutting the socket down ends the fetch at once.
    """
    deadline = time.monotonic() + timeout_s
    own = store.find(rank, Place.OWN)
    held = own.find(source.attempt, source.step, digest=source.digest) if own else None
    if held is not None and _is_wanted(held.digest, source) and store.check(rank, Place.OWN, held):
        return store.describe(rank, Place.OWN, held)
    timeouts = replace(
        timeouts,
        connect_s=min(timeouts.connect_s, timeout_s),
        handshake_s=min(timeouts.handshake_s, timeout_s),
        stall_s=min(timeouts.stall_s, timeout_s),
    )
    try:
        sock = wire.connect(secret, source.host, source.data_port, Role.FETCH, timeouts, tls=tls)
        with sock, store.writing(rank, Place.OWN):
            on_connected(sock)
            commit = _fetch_into(sock, source, rank, store, deadline)
    except (OSError, WireError) as error:
        raise SourceLost(
            f"rank {rank}, step {source.step} from {source.agent} "
            f"({source.host}:{source.data_port}): {error}"
        ) from error
    return store.describe(rank, Place.OWN, commit)


def _fetch_into(
    sock: socket.socket, source: Restore, rank: int, store: SegmentStore, deadline: float
) -> Commit:
    wire.send_header(
        sock,
        {
            "mesh": store.mesh,
            "rank": rank,
            "place": source.place,
            "attempt": source.attempt,
            "step": source.step,
            "digest": source.digest,
        },
    )
    answer = wire.receive_header(sock, deadline)
    digest, nbytes = wire.text_field(answer, "digest"), wire.int_field(answer, "nbytes")
    if not _is_wanted(digest, source):
        raise BadShard(f"{source.agent} holds digest {digest}, expected {source.digest}")
    if wire.int_field(answer, "layout") > wire.LAYOUT_LIMIT:
        raise WireError("the announced layout is above the limit")
    layout_bytes = bytearray(wire.int_field(answer, "layout"))
    wire.receive_into(sock, memoryview(layout_bytes), deadline=deadline)
    layout = wire.parse_layout(bytes(layout_bytes), wire.text_field(answer, "layout_digest"))
    segment = store.ensure(rank, Place.OWN, layout)
    if segment.layout.payload_bytes != nbytes:
        raise BadShard(f"{nbytes} bytes do not fit the layout sent with them")
    hasher = xxhash.xxh3_128()
    with segment.begin(source.step) as slot:
        wire.receive_into(sock, slot, hasher, deadline)
    if not wire.receive_header(sock, deadline).get("whole"):
        raise WireError("the commit was overwritten while it was sent")
    if hasher.hexdigest() != digest:
        raise BadShard(
            f"rank {rank}, step {source.step}: the bytes from {source.agent} differ from the digest"
        )
    return segment.commit(attempt=source.attempt, step=source.step, digest=digest)


def _is_wanted(digest: str, source: Restore) -> bool:
    return not source.digest or digest == source.digest
