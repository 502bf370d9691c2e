"""The format of a program's memory checkpoints, for random sets of parts."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_workers.program_memory.payload import (
    TRAILER_BYTES,
    BadPayload,
    PayloadFull,
    PayloadIndex,
    PayloadKind,
    PayloadPart,
    PayloadWriter,
    needed_bytes,
    payload_facts,
    program_layout,
    read_index,
)
from holdfast_workers.state.digest import payload_digest
from holdfast_workers.state.layout import ALIGNMENT

CONTENTS = st.dictionaries(st.text(max_size=20), st.binary(max_size=300), max_size=8)


def index_of(contents: dict[str, bytes]) -> PayloadIndex:
    most = sum(map(len, contents.values())) + ALIGNMENT * (len(contents) + 1)
    parts = {name: PayloadPart(most, len(content)) for name, content in contents.items()}
    return PayloadIndex(PayloadKind.FOLDER, 7, 1, 2, parts)


def _fill(content: bytes, view: memoryview) -> None:
    view[:] = content


def write(
    contents: dict[str, bytes], slot: memoryview, *, larger: memoryview | None = None
) -> tuple[PayloadIndex, str]:
    """Half of the parts are copied, the others filled; then the rest goes to `larger`."""
    writer, parts = PayloadWriter(slot), {}
    for number, (name, content) in enumerate(contents.items()):
        if number % 2:
            parts[name] = writer.copy(content)
        else:
            parts[name] = writer.fill(len(content), partial(_fill, content))
    if larger is not None:
        writer.move_to(larger)
    index = PayloadIndex(PayloadKind.FOLDER, 7, 1, 2, parts)
    return index, writer.finish(index)


@given(contents=CONTENTS, head_room=st.integers(0, 500), stale=st.integers(0, 255))
def test_what_is_written_is_read_again_and_has_its_digest(
    contents: dict[str, bytes], head_room: int, stale: int
) -> None:
    size = needed_bytes([len(each) for each in contents.values()], index_of(contents)) + head_room
    slot = memoryview(bytearray([stale]) * size)
    index, digest = write(contents, slot)
    assert read_index(slot) == index
    assert digest == payload_digest(slot)
    for name, part in index.parts.items():
        assert part.offset % ALIGNMENT == 0
        assert bytes(slot[part.offset : part.offset + part.nbytes]) == contents[name]


@given(contents=CONTENTS, grown=st.integers(0, 1000))
def test_a_payload_that_moves_to_a_larger_slot_is_the_same(
    contents: dict[str, bytes], grown: int
) -> None:
    size = needed_bytes([len(each) for each in contents.values()], index_of(contents))
    target = memoryview(bytearray(size + grown))
    index, digest = write(contents, memoryview(bytearray(size)), larger=target)
    assert read_index(target) == index
    assert digest == payload_digest(target)


@given(contents=CONTENTS, missing=st.integers(1, 400))
def test_a_slot_that_is_too_small_is_never_overrun(
    contents: dict[str, bytes], missing: int
) -> None:
    parts = [len(each) for each in contents.values()]
    least = sum(parts) + TRAILER_BYTES + len(PayloadIndex(PayloadKind.FOLDER, 7, 1, 2).to_json())
    with pytest.raises(PayloadFull):
        write(contents, memoryview(bytearray(max(0, least - missing))))


@given(raw=st.binary(max_size=400))
def test_bytes_of_another_kind_are_refused(raw: bytes) -> None:
    with pytest.raises(BadPayload):
        read_index(memoryview(raw))


@given(contents=CONTENTS, data=st.data())
def test_a_damaged_index_is_refused_or_stays_within_the_payload(
    contents: dict[str, bytes], data: st.DataObject
) -> None:
    size = needed_bytes([len(each) for each in contents.values()], index_of(contents))
    slot = memoryview(bytearray(size))
    write(contents, slot)
    at = data.draw(st.integers(0, size - 1))
    slot[at] ^= data.draw(st.integers(1, 255))
    try:
        index = read_index(slot)
    except BadPayload:
        return
    for part in index.parts.values():
        assert 0 <= part.offset <= part.offset + part.nbytes <= size


@pytest.mark.parametrize(
    ("kind", "alone", "divisible"),
    [
        (PayloadKind.DCP, False, True),
        (PayloadKind.DCP, True, False),
        (PayloadKind.FOLDER, False, True),
        (PayloadKind.OBJECT, False, False),
    ],
)
def test_a_ranks_own_state_cannot_be_divided(
    kind: PayloadKind, alone: bool, divisible: bool
) -> None:
    index = PayloadIndex(kind, 7, 1, 2, number=3, alone=alone)
    slot = memoryview(bytearray(512))
    PayloadWriter(slot).finish(index)
    assert payload_facts(program_layout(512), slot) == (3, divisible)
