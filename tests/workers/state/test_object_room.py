"""Payloads whose layouts differ in the room of objects alone are carried from one to the other."""

from __future__ import annotations

import pytest
import torch
from tests.workers.state.test_rank_state import SMALL, piece

from holdfast_workers.state.digest import payload_digest
from holdfast_workers.state.layout import StateLayout
from holdfast_workers.state.object_room import (
    LENGTH_BYTES,
    NoRoom,
    carry_over,
    differ_in_room,
    first_room,
    former_room,
    larger_room,
    packed,
    rooms,
    unpacked,
    with_rooms,
)
from holdfast_workers.state.rank_state import RankState, StateTensor


def state_of(raw: bytes, room: int, weights: float = 1.0) -> RankState:
    """A state with an object between a tensor and the small state."""
    whole = packed(raw).ljust(room, b"\0")
    content = torch.frombuffer(bytearray(whole), dtype=torch.uint8)
    box = piece("object.seen", content).box
    return RankState(
        [piece("w", torch.full((3,), weights)), StateTensor("object.seen", content, box)]
    )


def payload_of(state: RankState) -> memoryview:
    payload = memoryview(bytearray(state.layout.payload_bytes))
    state.freeze(SMALL).write(payload)
    return payload


def carried(payload: memoryview, layout: StateLayout, *ways: StateLayout) -> memoryview:
    """The payload, from the first layout to each of the others in turn."""
    for to in ways:
        target = memoryview(bytearray(b"\7" * to.payload_bytes))
        carry_over(payload, layout, target, to)
        payload, layout = target, to
    return payload


@pytest.mark.parametrize(("here", "there"), [(64, 256), (256, 64), (64, 64)])
def test_a_carried_payload_contains_the_state_and_the_room_that_it_had(
    here: int, there: int
) -> None:
    source, same = state_of(b"abc", here), state_of(b"abc", there)
    payload = carried(payload_of(source), source.layout, same.layout)
    entry = same.layout.tensors[1]
    content = payload[entry.offset : entry.offset + entry.nbytes]
    assert unpacked(content) == b"abc"
    assert former_room(content) == (0 if here == there else here)
    if here != there:
        entry_end = entry.offset + entry.nbytes
        payload[entry_end - LENGTH_BYTES : entry_end] = bytes(LENGTH_BYTES)
    assert payload_digest(payload) == same.digest(SMALL)
    assert differ_in_room(source.layout, same.layout) is (here != there)
    assert with_rooms(source.layout, rooms(same.layout)) == same.layout


def test_a_payload_that_is_carried_back_is_as_before() -> None:
    source, *others = (state_of(b"abc", room) for room in (64, 128, 512))
    ways = [*(state.layout for state in others), source.layout]
    assert bytes(carried(payload_of(source), source.layout, *ways)) == bytes(payload_of(source))


def test_content_up_to_the_end_of_its_room_names_no_former_room() -> None:
    assert former_room(packed(b"\7" * 56)) == 0
    assert former_room(packed(b"\7" * 50).ljust(64, b"\0")) == 0


def test_without_objects_only_the_rest_is_carried() -> None:
    source, target_state = state_of(bytes(100), 128), state_of(b"", 64)
    target = memoryview(bytearray(target_state.layout.payload_bytes))
    carry_over(payload_of(source), source.layout, target, target_state.layout, objects=False)
    assert bytes(target) == bytes(payload_of(target_state))


def test_content_that_does_not_fit_is_refused_by_name() -> None:
    source, target_state = state_of(bytes(100), 128), state_of(b"", 64)
    target = memoryview(bytearray(target_state.layout.payload_bytes))
    with pytest.raises(NoRoom, match=r"object\.seen takes 108 bytes, there is room for 64"):
        carry_over(payload_of(source), source.layout, target, target_state.layout)


def test_a_cut_entry_is_not_taken_for_a_whole_one() -> None:
    with pytest.raises(NoRoom, match="takes 108 bytes of an entry of 64"):
        unpacked(packed(bytes(100))[:64])


def test_layouts_of_other_tensors_do_not_differ_in_room_alone() -> None:
    one = state_of(b"", 64).layout
    other = RankState([piece("w", torch.zeros(4))]).layout
    assert not differ_in_room(one, one)
    assert not differ_in_room(one, other)
    assert not differ_in_room(one, StateLayout((), 0))


def test_a_growing_object_changes_its_room_seldom_and_always_fits() -> None:
    raw, room, changes = b"", first_room(b""), 0
    for nbytes in range(0, 100_000, 7):
        raw = bytes(nbytes)
        if len(packed(raw)) > room:
            room, changes = larger_room(raw), changes + 1
            assert room >= len(raw) * 5 / 4
        assert unpacked(packed(raw).ljust(room, b"\0")) == raw
    assert changes == 5
