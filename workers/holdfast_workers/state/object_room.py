"""The room of a function's encoded objects in a payload, which grows with them.

An object's entry contains the length of its encoding, the encoding, and zeros up to its room. So
layouts that differ in rooms alone hold the same state, and a payload can be carried from the one to
the other. Each rank gives room for itself; a rank that restores takes the rooms that it finds. A
carried entry ends with its former room, so that the restored state has the digest that it had.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from holdfast_workers.state.layout import OBJECT_PREFIX, StateLayout, TensorEntry, aligned

MIN_ROOM_BYTES = 4096
FIRST_ROOM_FACTOR = 2
LENGTH_BYTES = 8


class NoRoom(Exception):
    """The content of an entry is larger than the entry."""


def first_room(raw: bytes) -> int:
    """The room of an object that is registered with the encoding `raw`."""
    return -(-(FIRST_ROOM_FACTOR * len(raw) + LENGTH_BYTES) // MIN_ROOM_BYTES) * MIN_ROOM_BYTES


def larger_room(raw: bytes) -> int:
    """The room of an object that has outgrown its former room: a power of two, a quarter at least
    of it free, so that it grows seldom, and alike in every run."""
    return 1 << (len(raw) + len(raw) // 3 + LENGTH_BYTES - 1).bit_length()


def packed(raw: bytes) -> bytes:
    return len(raw).to_bytes(LENGTH_BYTES, "little") + raw


def unpacked(content: bytes | memoryview) -> bytes:
    """Raises NoRoom if a part of it is not there."""
    if _packed_bytes(content) > len(content):
        raise NoRoom(
            f"an object takes {_packed_bytes(content)} bytes of an entry of {len(content)}: the "
            "ranks have saved different states of it"
        )
    return bytes(content[LENGTH_BYTES : _packed_bytes(content)])


def rooms(layout: StateLayout) -> dict[str, int]:
    """The bytes of each object's entry, by the entry's name."""
    return {entry.name: entry.nbytes for entry in layout.tensors if is_object(entry)}


def is_object(entry: TensorEntry) -> bool:
    return entry.name.startswith(OBJECT_PREFIX)


def with_rooms(layout: StateLayout, nbytes: Mapping[str, int]) -> StateLayout:
    """`layout` with these rooms; entries that are not named keep theirs."""
    if all(nbytes.get(name, room) == room for name, room in rooms(layout).items()):
        return layout
    tensors, offset = [], 0
    for entry in layout.tensors:
        room = nbytes.get(entry.name, entry.nbytes)
        if is_object(entry):
            sized = replace(entry, global_shape=(room,), shape=(room,), nbytes=room, offset=offset)
        else:
            sized = replace(entry, offset=offset)
        tensors.append(sized)
        offset += aligned(sized.nbytes)
    return StateLayout(tuple(tensors), offset)


def differ_in_room(one: StateLayout, other: StateLayout) -> bool:
    """Whether the layouts differ, and in nothing but rooms."""
    return one != other and with_rooms(one, rooms(other)) == other


def carry_over(
    source: memoryview,
    from_layout: StateLayout,
    target: memoryview,
    to_layout: StateLayout,
    *,
    objects: bool = True,
) -> None:
    """Fill `target` with the state in `source`; the layouts differ in rooms at most. Without
    `objects`, theirs are left empty. Raises NoRoom if a room is too small."""
    for there, here in zip(from_layout.tensors, to_layout.tensors, strict=True):
        content = source[there.offset : there.offset + there.nbytes]
        entry = target[here.offset : here.offset + aligned(here.nbytes)]
        if is_object(there):
            _carry_object(content, entry[: here.nbytes], here.name, empty=not objects)
        else:
            entry[: here.nbytes] = content
        entry[here.nbytes :] = bytes(len(entry) - here.nbytes)


def former_room(content: bytes | memoryview) -> int:
    """The room that an entry had before it was carried; 0 if it has the same."""
    if _packed_bytes(content) + LENGTH_BYTES > len(content):
        return 0
    return int.from_bytes(content[-LENGTH_BYTES:], "little")


def _carry_object(source: memoryview, target: memoryview, name: str, *, empty: bool) -> None:
    content = b"" if empty else source[: _packed_bytes(source)]
    former = former_room(source) or len(source)
    mark = b"" if empty or former == len(target) else former.to_bytes(LENGTH_BYTES, "little")
    free = len(target) - len(content) - len(mark)
    if free < 0:
        raise NoRoom(f"{name} takes {len(content)} bytes, there is room for {len(target)}")
    target[:] = b"".join((content, bytes(free), mark))


def _packed_bytes(content: bytes | memoryview) -> int:
    return LENGTH_BYTES + int.from_bytes(content[:LENGTH_BYTES], "little")
