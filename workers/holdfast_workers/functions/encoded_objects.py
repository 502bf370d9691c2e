"""The encodings of a function's objects, in buffers with room to grow (`state/object_room.py`)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from holdfast_workers.state.layout import OBJECT_PREFIX, StateLayout
from holdfast_workers.state.object_room import (
    first_room,
    former_room,
    larger_room,
    packed,
    rooms,
    unpacked,
)


class EncodedObjects:
    """A buffer per object. A change of room puts another buffer in its place, because a copy of the
    former one may still be running."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Each object's name and its buffer."""
        yield from self._buffers.items()

    def write(self, name: str, raw: bytes) -> bool:
        """Store an encoding; returns whether the object has got larger room."""
        whole, grown = packed(raw), False
        if name not in self._buffers:
            self._give_room(name, first_room(raw))
        elif len(whole) > self._buffers[name].numel():
            grown = self._give_room(name, larger_room(raw))
        buffer = self._buffers[name]
        buffer[: len(whole)] = torch.frombuffer(bytearray(whole), dtype=torch.uint8)
        buffer[len(whole) :] = 0
        return grown

    def encodings(self) -> dict[str, bytes]:
        """The content of each buffer, without its spare room."""
        return {name: unpacked(buffer.numpy().data) for name, buffer in self}

    def take_rooms(self, layout: StateLayout) -> bool:
        """Give the objects the room that they have in `layout`; returns whether one changes."""
        found = [(name.removeprefix(OBJECT_PREFIX), room) for name, room in rooms(layout).items()]
        changes = [self._give_room(n, room) for n, room in found if n in self._buffers]
        return any(changes)

    def take_former_rooms(self) -> bool:
        """Give the objects the room that they had when they were saved."""
        former = [(name, former_room(buffer.numpy().data)) for name, buffer in self]
        changes = [self._give_room(name, room) for name, room in former]
        return any(changes)

    def _give_room(self, name: str, nbytes: int) -> bool:
        """Give an object this room. Returns False if it has it already."""
        if not nbytes or (name in self._buffers and self._buffers[name].numel() == nbytes):
            return False
        self._buffers[name] = torch.zeros(nbytes, dtype=torch.uint8)
        return True
