"""The format of what one rank keeps of a step: parts of bytes, and an index behind them.

    part | part | … | index (JSON) | unused | trailer

Parts begin at multiples of 64 bytes; the trailer, at the end of the slot, says where the index is.
The unused bytes are head-room, so that the next step may take more. The digest, xxh3-128, covers
the whole slot. Parts are hashed while they are written and still in the processor's cache. Pure:
works on views of memory.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum

import xxhash

from holdfast_workers.errors import WorkersError
from holdfast_workers.state.layout import StateLayout, TensorEntry, aligned

PROGRAM_STATE = "holdfast.program"
"""Name of the only entry of the layout: to all others, the payload is opaque bytes of one rank."""
MAGIC = b"HFPROG01"
CHUNK_BYTES = 1 << 20
"""Copied and hashed at once: fits into a core's own cache."""
_TRAILER = struct.Struct("<8sQQ")  # magic, offset and length of the index
TRAILER_BYTES = _TRAILER.size


class BadPayload(WorkersError):
    """The bytes are not a payload of this format."""


class PayloadFull(WorkersError):
    """The slot is too small for what is to be written."""


class PayloadKind(StrEnum):
    """The way in which a payload was saved, and so can be loaded."""

    DCP = "dcp"
    """Saved by `torch.distributed.checkpoint`."""
    OBJECT = "object"
    """An object, by `torch.save`."""
    FOLDER = "folder"
    """Files."""


@dataclass(frozen=True)
class PayloadPart:
    """A named range of a payload, in bytes."""

    offset: int
    nbytes: int


@dataclass(frozen=True)
class PayloadIndex:
    """The content of a payload."""

    kind: PayloadKind
    step: int
    rank: int
    world_size: int
    """Size of the world that saved the payload."""
    parts: Mapping[str, PayloadPart] = field(default_factory=dict)
    number: int = 0
    """Number of the save in its attempt, the same on all ranks: it tells saves of one step
    apart."""
    alone: bool = False
    """The rank saved without the others: what it needs lies in its own payload."""

    @property
    def divisible(self) -> bool:
        """Whether a world of another size can load the step; no rank's own state can be divided."""
        return self.kind is not PayloadKind.OBJECT and not self.alone

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @staticmethod
    def from_json(text: bytes) -> PayloadIndex:
        """Raises BadPayload."""
        try:
            fields = json.loads(text)
            fields["kind"] = PayloadKind(fields["kind"])
            fields["parts"] = {name: PayloadPart(**part) for name, part in fields["parts"].items()}
            return PayloadIndex(**fields)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadPayload(f"a memory checkpoint has an unreadable index: {error}") from error


class PayloadWriter:
    """Fills one slot, part by part."""

    def __init__(self, slot: memoryview) -> None:
        self._slot = slot
        self._at = 0
        self._hasher = xxhash.xxh3_128()

    @property
    def written_bytes(self) -> int:
        """Size of the parts so far, with their padding."""
        return self._at

    def room_for(self, nbytes: int, index: PayloadIndex) -> bool:
        """Whether a part of `nbytes` and then `index` fit."""
        return self._at + needed_bytes([nbytes], index) <= self._slot.nbytes

    def copy(self, source: memoryview | bytes) -> PayloadPart:
        """Append a part with the bytes of `source`."""
        view = memoryview(source).cast("B")

        def fill(target: memoryview) -> None:
            for start in range(0, view.nbytes, CHUNK_BYTES):
                piece = view[start : start + CHUNK_BYTES]
                target[start : start + piece.nbytes] = piece
                self._hasher.update(piece)

        return self._append(view.nbytes, fill)

    def fill(self, nbytes: int, write: Callable[[memoryview], object]) -> PayloadPart:
        """Append a part of `nbytes`, which `write` fills."""

        def fill(target: memoryview) -> None:
            write(target)
            self._hasher.update(target)

        return self._append(nbytes, fill)

    def move_to(self, slot: memoryview) -> None:
        """Continue in another, larger slot: what is written is copied there."""
        slot[: self._at] = self._slot[: self._at]
        self._slot = slot

    def finish(self, index: PayloadIndex) -> str:
        """Append the index; returns the digest of the slot. Raises PayloadFull."""
        text = index.to_json()
        part = self.copy(text)
        trailer = _TRAILER.pack(MAGIC, part.offset, len(text))
        end = self._slot.nbytes - len(trailer)
        if self._at > end:
            raise PayloadFull(f"no room for the trailer behind {self._at} of {end} bytes")
        self._slot[end:] = trailer
        self._hasher.update(self._slot[self._at :])
        return str(self._hasher.hexdigest())

    def _append(self, nbytes: int, fill: Callable[[memoryview], None]) -> PayloadPart:
        start, end = self._at, self._at + nbytes
        padded = start + aligned(nbytes)
        if padded > self._slot.nbytes:
            raise PayloadFull(f"{nbytes} bytes at {start} exceed {self._slot.nbytes}")
        if nbytes:
            fill(self._slot[start:end])
        if padded > end:
            self._slot[end:padded] = bytes(padded - end)
            self._hasher.update(self._slot[end:padded])
        self._at = padded
        return PayloadPart(start, nbytes)


def read_index(payload: memoryview) -> PayloadIndex:
    """The index of a written slot. Raises BadPayload."""
    if payload.nbytes < _TRAILER.size:
        raise BadPayload(f"{payload.nbytes} bytes are no memory checkpoint of a program")
    magic, offset, length = _TRAILER.unpack(payload[-_TRAILER.size :])
    if magic != MAGIC:
        raise BadPayload(f"a memory checkpoint of a program ends with {MAGIC!r}, not {magic!r}")
    if offset + length > payload.nbytes - _TRAILER.size:
        raise BadPayload(f"the index lies at {offset}, beyond the {payload.nbytes} bytes")
    index = PayloadIndex.from_json(bytes(payload[offset : offset + length]))
    for name, part in index.parts.items():
        if part.offset < 0 or part.nbytes < 0 or part.offset + part.nbytes > offset:
            raise BadPayload(f"the part {name} lies outside of the payload")
    return index


def payload_facts(layout: StateLayout, payload: memoryview) -> tuple[int, bool]:
    """The number of the save of which `payload` is a part, and whether a world of another mesh can
    load it. Unverified: (0, True), if it is damaged, or that of another program than a user's
    own."""
    if [entry.name for entry in layout.tensors] != [PROGRAM_STATE]:
        return 0, True
    try:
        index = read_index(payload)
    except BadPayload:
        return 0, True
    return index.number, index.divisible


def needed_bytes(parts: list[int], index: PayloadIndex) -> int:
    """The least slot for parts of these sizes and `index`, which names them."""
    return sum(map(aligned, parts)) + aligned(len(index.to_json())) + aligned(_TRAILER.size)


def program_layout(nbytes: int) -> StateLayout:
    """The layout of a segment whose slots have `nbytes`."""
    entry = TensorEntry(
        PROGRAM_STATE, "uint8", (nbytes,), (0,), (nbytes,), 0, nbytes, per_rank=True
    )
    return StateLayout((entry,), nbytes)
