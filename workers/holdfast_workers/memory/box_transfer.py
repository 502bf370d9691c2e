"""Transfer of boxes of a commit between node agents: both sides of the data channel's `boxes` role.

The source verifies its whole payload against the commit's digest once, before it sends any part of
it; while it does, it tells the client that it is alive. The bytes of the boxes are hashed when they
are sent and again when they are received. So every byte that arrives is covered by the commit's
digest, although no digest of just these boxes exists.
Transfers use batches of bounded size; nothing else is allocated, no matter how many short ranges a
box consists of.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import xxhash

from holdfast_workers.checkpoint.boxes import Box
from holdfast_workers.checkpoint.moves import Move, box_of
from holdfast_workers.checkpoint.pieces import (
    BATCH_BYTES,
    Array,
    batches,
    gather,
    scatter,
    view_of,
)
from holdfast_workers.memory import wire
from holdfast_workers.memory.peer_tls import PeerTls
from holdfast_workers.memory.segment import Commit, Segment
from holdfast_workers.memory.segment_store import SegmentStore
from holdfast_workers.memory.wire import RefusalCode, Role, Timeouts, WireError, WireRefused
from holdfast_workers.protocol.messages import Origin, Place, Restore
from holdfast_workers.state.digest import payload_digest
from holdfast_workers.state.layout import StateLayout

_BEATS_PER_STALL = 5


def requested_commit(store: SegmentStore, header: dict[str, Any]) -> tuple[Place, Segment, Commit]:
    """The commit that a request names. Raises WireRefused if this node does not hold it."""
    rank, attempt, step = (wire.int_field(header, key) for key in ("rank", "attempt", "step"))
    place = Place.OWN if header.get("place") == Place.OWN else Place.REPLICA
    segment = store.find(rank, place)
    commit = segment.find(attempt, step, digest=str(header.get("digest", ""))) if segment else None
    if segment is None or commit is None:
        raise WireRefused(
            RefusalCode.NOT_HELD, f"{place} of rank {rank}, step {step} of attempt {attempt}"
        )
    return place, segment, commit


def serve_boxes(
    sock: socket.socket,
    header: dict[str, Any],
    store_for: Callable[[dict[str, Any]], SegmentStore],
    timeouts: Timeouts,
) -> None:
    """Answer one request for the layout of a commit, or for boxes of it."""
    match header.get("op"):
        case "layout":
            _, segment, _ = requested_commit(store_for(header), header)
            layout = segment.layout.to_json()
            wire.send_header(sock, {"layout": len(layout), "digest": payload_digest(layout)})
            wire.send_payload(sock, layout)
        case "boxes":
            # Read the list before any refusal, so that the stream stays in sync.
            boxes = _receive_boxes(sock, header)
            store = store_for(header)
            place, segment, commit = requested_commit(store, header)
            segment.pin(commit, timeouts.stall_s)
            try:
                rank, beat = wire.int_field(header, "rank"), beat_to(sock, timeouts.stall_s)
                if not store.check_once(rank, place, commit, beat):
                    raise WireRefused(
                        RefusalCode.BAD_DIGEST, f"step {commit.step} is damaged in memory here"
                    )
                _send_boxes(sock, segment, commit, boxes)
            finally:
                segment.unpin()
        case other:
            raise WireError(f"unknown request {other!r}")


def beat_to(sock: socket.socket, stall_s: float) -> Callable[[], None]:
    """Called often while a payload is verified: tells the client several times within its stall
    timeout that an answer will come. Raises OSError if the client has gone."""
    last = time.monotonic()

    def beat() -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= stall_s / _BEATS_PER_STALL:
            wire.send_header(sock, {"verifying": True})
            last = now

    return beat


class BoxChannel:
    """The client: a connection to an agent that holds parts of the state that `source` names."""

    def __init__(self, sock: socket.socket, source: Restore) -> None:
        self._sock = sock
        self._source = source

    @classmethod
    def connect(
        cls,
        secret: bytes,
        host: str,
        port: int,
        source: Restore,
        timeouts: Timeouts,
        tls: PeerTls | None = None,
    ) -> BoxChannel:
        return cls(wire.connect(secret, host, port, Role.BOXES, timeouts, tls=tls), source)

    @property
    def sock(self) -> socket.socket:
        return self._sock

    def layout(self, origin: Origin, deadline: float) -> StateLayout:
        """The layout of the payload of `origin`. Raises WireRefused if it is no longer held."""
        wire.send_header(self._sock, self._request("layout", origin))
        answer = wire.receive_header(self._sock, deadline)
        if wire.int_field(answer, "layout") > wire.LAYOUT_LIMIT:
            raise WireError("the announced layout is above the limit")
        raw = bytearray(wire.int_field(answer, "layout"))
        wire.receive_into(self._sock, memoryview(raw), deadline=deadline)
        return wire.parse_layout(bytes(raw), wire.text_field(answer, "digest"))

    def take(
        self, origin: Origin, moves: Sequence[Move], views: Sequence[Array], deadline: float
    ) -> None:
        """Fill `views` with the boxes of `moves`, in the same order, from the commit of `origin`.

        Raises WireRefused, or WireError if the commit was overwritten or the bytes are damaged.
        """
        raw = json.dumps(
            [[move.source_tensor, move.box.offsets, move.box.shape] for move in moves],
            separators=(",", ":"),
        ).encode()
        request_list = {"nbytes": len(raw), "listed": payload_digest(raw)}
        wire.send_header(self._sock, {**self._request("boxes", origin), **request_list})
        wire.send_payload(self._sock, raw, deadline)
        answer = self._receive_answer(deadline)
        nbytes = sum(view.nbytes for view in views)
        if (wire.text_field(answer, "digest"), wire.int_field(answer, "nbytes")) != (
            origin.digest,
            nbytes,
        ):
            raise WireError(f"{answer} does not match the request: {nbytes} bytes of {origin}")
        hasher = xxhash.xxh3_128()
        buffer = np.empty(BATCH_BYTES, dtype=np.uint8)
        for batch in batches(views):
            used = buffer[: sum(piece.nbytes for piece in batch)]
            wire.receive_into(self._sock, used.data, hasher, deadline)
            scatter(batch, buffer)
        end = wire.receive_header(self._sock, deadline)
        if not end.get("whole"):
            raise WireError("the commit was overwritten while it was sent")
        if wire.text_field(end, "sent") != hasher.hexdigest():
            raise WireError("the bytes received differ from the bytes sent")

    def _receive_answer(self, deadline: float) -> dict[str, Any]:
        """The answer's header. The source verifies its whole payload first, however long that
        takes, and says so meanwhile."""
        while "verifying" in (answer := wire.receive_header(self._sock, deadline)):
            pass
        return answer

    def _request(self, op: str, origin: Origin) -> dict[str, Any]:
        return {
            "op": op,
            "mesh": self._source.mesh,
            "rank": origin.rank,
            "place": origin.place,
            "attempt": self._source.attempt,
            "step": self._source.step,
            "digest": origin.digest,
        }


def checked_view(payload: memoryview, layout: StateLayout, tensor: int, box: Box) -> Array:
    """`view_of` for a box from a request. Raises WireError if the tensor has no such box."""
    if tensor < len(layout.tensors):
        entry = layout.tensors[tensor]
        full = box_of(entry)
        if len(box.shape) == len(full.shape) and full.intersect(box) == box:
            return view_of(payload, entry, box)
    raise WireError(f"there is no {box} of tensor {tensor}")


def _send_boxes(
    sock: socket.socket, segment: Segment, commit: Commit, boxes: list[tuple[int, Box]]
) -> None:
    hasher = xxhash.xxh3_128()
    buffer = np.empty(BATCH_BYTES, dtype=np.uint8)
    payload = segment.payload(commit)
    views = [checked_view(payload, segment.layout, tensor, box) for tensor, box in boxes]
    nbytes = sum(view.nbytes for view in views)
    wire.send_header(sock, {"digest": commit.digest, "nbytes": nbytes})
    for batch in batches(views):
        used = buffer[: gather(batch, buffer)].data
        hasher.update(used)
        sock.sendall(used)
    wire.send_header(sock, {"whole": segment.is_current(commit), "sent": hasher.hexdigest()})


def _receive_boxes(sock: socket.socket, header: dict[str, Any]) -> list[tuple[int, Box]]:
    nbytes = wire.int_field(header, "nbytes")
    if nbytes > wire.LAYOUT_LIMIT:
        raise WireError(f"a list of boxes of {nbytes} bytes is above the limit")
    raw = bytearray(nbytes)
    wire.receive_into(sock, memoryview(raw))
    if payload_digest(raw) != wire.text_field(header, "listed"):
        raise WireError("the list of boxes does not have the announced digest")
    try:
        return [
            (_non_negative_int(tensor), Box(_non_negative_ints(offsets), _non_negative_ints(shape)))
            for tensor, offsets, shape in json.loads(raw)
        ]
    except (ValueError, TypeError) as error:
        raise WireError(f"not a list of boxes: {error}") from error


def _non_negative_ints(values: object) -> tuple[int, ...]:
    if not isinstance(values, list):
        raise ValueError(f"{values!r} is not a list")
    return tuple(_non_negative_int(value) for value in values)


def _non_negative_int(value: object) -> int:
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is not a non-negative integer")
    return value
