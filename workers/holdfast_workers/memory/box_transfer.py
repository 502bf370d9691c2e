"""Boxes of a commit, from one node agent to another: both sides of the data channel's `boxes`.

The source's payload is read against its digest once per commit before any part of it is given;
what is given is hashed as it is sent, and again as it is received. So every byte that arrives is
one that the commit's own digest vouches for, although no digest of just these boxes existed.
Batches of bounded size; nothing else is allocated, however many short ranges a box is made of.
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
    spread,
    view_of,
)
from holdfast_workers.memory import wire
from holdfast_workers.memory.segment import Commit, Segment
from holdfast_workers.memory.segment_store import SegmentStore
from holdfast_workers.memory.wire import Code, Refused, Role, Timeouts, WireError
from holdfast_workers.protocol.messages import Origin, Place, Restore
from holdfast_workers.state.digest import payload_digest
from holdfast_workers.state.layout import StateLayout


def wanted_commit(store: SegmentStore, header: dict[str, Any]) -> tuple[Place, Segment, Commit]:
    """The commit that a request names. Raises Refused if it is not here."""
    rank, attempt, step = (wire.whole(header, key) for key in ("rank", "attempt", "step"))
    place = Place.OWN if header.get("place") == Place.OWN else Place.REPLICA
    segment = store.find(rank, place)
    commit = segment.find(attempt, step) if segment else None
    if segment is None or commit is None:
        raise Refused(Code.NOT_HELD, f"{place} of rank {rank}, step {step} of attempt {attempt}")
    return place, segment, commit


def give_boxes(
    sock: socket.socket,
    header: dict[str, Any],
    store_for: Callable[[dict[str, Any]], SegmentStore],
    timeouts: Timeouts,
) -> None:
    """Answer one request for a commit's layout, or for boxes of it."""
    match header.get("op"):
        case "layout":
            _, segment, _ = wanted_commit(store_for(header), header)
            layout = segment.layout.to_json()
            wire.send_header(sock, {"layout": len(layout), "digest": payload_digest(layout)})
            wire.send_payload(sock, layout)
        case "boxes":
            boxes = _receive_boxes(sock, header)  # first of all: a refusal keeps the stream in step
            store = store_for(header)
            place, segment, commit = wanted_commit(store, header)
            segment.pin(commit, timeouts.stall_s)
            try:
                if not store.check_once(wire.whole(header, "rank"), place, commit):
                    raise Refused(Code.BAD_DIGEST, f"step {commit.step} is damaged in memory here")
                _give(sock, segment, commit, boxes)
            finally:
                segment.unpin()
        case other:
            raise WireError(f"unknown request {other!r}")


class BoxChannel:
    """The asking side: one connection to an agent that holds parts of a state of `mesh`."""

    def __init__(self, sock: socket.socket, source: Restore) -> None:
        self._sock = sock
        self._source = source

    @classmethod
    def connect(
        cls, secret: bytes, host: str, port: int, source: Restore, timeouts: Timeouts
    ) -> BoxChannel:
        return cls(wire.connect(secret, host, port, Role.BOXES, timeouts), source)

    @property
    def sock(self) -> socket.socket:
        return self._sock

    def layout(self, origin: Origin, deadline: float) -> StateLayout:
        """How the payload of `origin` lies. Raises Refused if it is not held any more."""
        wire.send_header(self._sock, self._request("layout", origin))
        answer = wire.receive_header(self._sock, deadline)
        if wire.whole(answer, "layout") > wire.LAYOUT_LIMIT:
            raise WireError("the layout announced is above the limit")
        raw = bytearray(wire.whole(answer, "layout"))
        wire.receive_into(self._sock, memoryview(raw), deadline=deadline)
        return wire.parse_layout(bytes(raw), wire.text(answer, "digest"))

    def take(
        self, origin: Origin, moves: Sequence[Move], views: Sequence[Array], deadline: float
    ) -> None:
        """Fill `views`, which the boxes of `moves` are for, from the commit of `origin`.

        Raises Refused, or WireError if it was overwritten or not what was sent.
        """
        raw = json.dumps(
            [[move.source_tensor, move.box.offsets, move.box.shape] for move in moves],
            separators=(",", ":"),
        ).encode()
        listed = {"nbytes": len(raw), "listed": payload_digest(raw)}
        wire.send_header(self._sock, {**self._request("boxes", origin), **listed})
        wire.send_payload(self._sock, raw, deadline)
        answer = self._answer_once_verified(deadline)
        nbytes = sum(view.nbytes for view in views)
        if (wire.text(answer, "digest"), wire.whole(answer, "nbytes")) != (origin.digest, nbytes):
            raise WireError(f"{answer} is not what was asked for: {nbytes} bytes of {origin}")
        hasher = xxhash.xxh3_128()
        stage = np.empty(BATCH_BYTES, dtype=np.uint8)
        for batch in batches(views):
            taken = stage[: sum(piece.nbytes for piece in batch)]
            wire.receive_into(self._sock, taken.data, hasher, deadline)
            spread(batch, stage)
        end = wire.receive_header(self._sock, deadline)
        if not end.get("whole"):
            raise WireError("the commit was overwritten while it was sent")
        if wire.text(end, "sent") != hasher.hexdigest():
            raise WireError("other bytes arrived than were sent")

    def _answer_once_verified(self, deadline: float) -> dict[str, Any]:
        """The source reads all of its payload first: that is no stall."""
        stall_s = self._sock.gettimeout()
        self._sock.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            return wire.receive_header(self._sock, deadline)
        finally:
            self._sock.settimeout(stall_s)

    def _request(self, op: str, origin: Origin) -> dict[str, Any]:
        return {
            "op": op,
            "mesh": self._source.mesh,
            "rank": origin.rank,
            "place": origin.place,
            "attempt": self._source.attempt,
            "step": self._source.step,
        }


def checked_view(payload: memoryview, layout: StateLayout, tensor: int, box: Box) -> Array:
    """As `view_of`, for a box that somebody else names. Raises WireError if it is not there."""
    if tensor < len(layout.tensors):
        entry = layout.tensors[tensor]
        whole = box_of(entry)
        if len(box.shape) == len(whole.shape) and whole.intersect(box) == box:
            return view_of(payload, entry, box)
    raise WireError(f"there is no {box} of tensor {tensor}")


def _give(
    sock: socket.socket, segment: Segment, commit: Commit, boxes: list[tuple[int, Box]]
) -> None:
    hasher = xxhash.xxh3_128()
    stage = np.empty(BATCH_BYTES, dtype=np.uint8)
    payload = segment.payload(commit)
    views = [checked_view(payload, segment.layout, tensor, box) for tensor, box in boxes]
    nbytes = sum(view.nbytes for view in views)
    wire.send_header(sock, {"digest": commit.digest, "nbytes": nbytes})
    for batch in batches(views):
        taken = stage[: gather(batch, stage)].data
        hasher.update(taken)
        sock.sendall(taken)
    wire.send_header(sock, {"whole": segment.is_current(commit), "sent": hasher.hexdigest()})


def _receive_boxes(sock: socket.socket, header: dict[str, Any]) -> list[tuple[int, Box]]:
    nbytes = wire.whole(header, "nbytes")
    if nbytes > wire.LAYOUT_LIMIT:
        raise WireError(f"a list of boxes of {nbytes} bytes is above the limit")
    raw = bytearray(nbytes)
    wire.receive_into(sock, memoryview(raw))
    if payload_digest(raw) != wire.text(header, "listed"):
        raise WireError("not the list of boxes that was announced")
    try:
        return [
            (_natural(tensor), Box(_naturals(offsets), _naturals(shape)))
            for tensor, offsets, shape in json.loads(raw)
        ]
    except (ValueError, TypeError) as error:
        raise WireError(f"not a list of boxes: {error}") from error


def _naturals(values: object) -> tuple[int, ...]:
    if not isinstance(values, list):
        raise ValueError(f"{values!r} is no list")
    return tuple(_natural(value) for value in values)


def _natural(value: object) -> int:
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is no whole number")
    return value
