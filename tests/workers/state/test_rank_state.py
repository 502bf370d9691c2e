"""A state is written to a payload and read back bit for bit, and never from a wrong payload."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from holdfast_workers.state.digest import ShardDigest, payload_digest
from holdfast_workers.state.layout import SMALL_STATE, StateLayout
from holdfast_workers.state.rank_state import (
    CopyStopped,
    RankBytes,
    RankState,
    ShardBox,
    StateMismatch,
    StateTensor,
    shard_box_of,
)

SMALL = {"step": 5, "seed": 1}
GENERATOR = RankBytes("random.cpu", torch.get_rng_state, torch.set_rng_state)


def piece(name: str, tensor: Tensor) -> StateTensor:
    shape = tuple(tensor.shape)
    return StateTensor(name, tensor, ShardBox(shape, (0,) * len(shape), shape, primary=True))


@pytest.fixture
def tensors() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) for shape in ((3, 5), (7,), (0, 4), (16, 4))]


@pytest.fixture
def state(tensors: list[Tensor]) -> RankState:
    pieces = [piece(f"t{index}", tensor) for index, tensor in enumerate(tensors)]
    return RankState(pieces, [GENERATOR])


def test_a_written_state_is_read_back_in_place(state: RankState, tensors: list[Tensor]) -> None:
    torch.manual_seed(3)
    payload = memoryview(bytearray(state.layout.payload_bytes))
    state.freeze(SMALL).write(payload)
    kept = [tensor.clone() for tensor in tensors]
    drawn = torch.rand(3)
    for tensor in tensors:
        tensor.fill_(float("nan"))
    assert state.read(payload) == SMALL
    assert all(torch.equal(a, b) for a, b in zip(tensors, kept, strict=True))
    assert torch.equal(torch.rand(3), drawn)


def test_a_payload_may_be_read_only(state: RankState) -> None:
    payload = bytearray(state.layout.payload_bytes)
    state.freeze(SMALL).write(memoryview(payload))
    assert state.read(memoryview(bytes(payload))) == SMALL


def test_every_byte_is_written(state: RankState) -> None:
    nbytes = state.layout.payload_bytes
    zeros, ones = bytearray(nbytes), bytearray(b"\xff" * nbytes)
    state.freeze(SMALL).write(memoryview(zeros))
    state.freeze(SMALL).write(memoryview(ones))
    assert zeros == ones


def test_the_digest_needs_no_payload(state: RankState) -> None:
    payload = bytearray(state.layout.payload_bytes)
    state.freeze(SMALL).write(memoryview(payload))
    assert state.digest(SMALL) == payload_digest(payload)


@given(st.lists(st.integers(0, 3 * 65_537), max_size=4))
@settings(max_examples=30)
def test_the_digest_computed_while_copying_equals_the_payloads(sizes: list[int]) -> None:
    tensors = [torch.arange(size, dtype=torch.float32) for size in sizes]
    pieces = [piece(f"t{index}", tensor) for index, tensor in enumerate(tensors)]
    state = RankState(pieces, [GENERATOR])
    payload = bytearray(b"\xff" * state.layout.payload_bytes)
    digest = state.freeze(SMALL).write(memoryview(payload))
    assert digest == payload_digest(payload) == state.digest(SMALL)


@given(st.lists(st.tuples(st.integers(0, 2 * 65_537), st.booleans()), max_size=4), st.booleans())
@settings(max_examples=30)
def test_what_replicas_share_stands_first_and_is_digested_in_the_same_pass(
    sizes: list[tuple[int, bool]], has_own_bytes: bool
) -> None:
    pieces = [
        replace(piece(f"t{index}", torch.arange(size, dtype=torch.float32)), local=local)
        for index, (size, local) in enumerate(sizes)
    ]
    state = RankState(pieces, [GENERATOR] if has_own_bytes else [])
    layout = state.layout
    payload = memoryview(bytearray(layout.payload_bytes))
    digest = state.freeze(SMALL).copy_to(payload)
    assert digest == state.freeze(SMALL).shard_digest()
    assert digest == ShardDigest.of_payload(payload, layout, payload_digest(payload))
    assert digest.shared == payload_digest(payload[: layout.shared_bytes])
    apart = [entry.offset >= layout.shared_bytes for entry in layout.tensors]
    alone = [local for _, local in sorted(sizes, key=lambda size: size[1])]
    if True in alone or has_own_bytes:
        assert apart == [*alone, *([True] if has_own_bytes else []), True]
    else:
        assert layout.shared_bytes == layout.payload_bytes


def test_only_what_replicas_share_changes_their_common_digest() -> None:
    shared, local = torch.zeros(3), torch.zeros(3)
    state = RankState([replace(piece("local", local), local=True), piece("shared", shared)])
    before = state.freeze(SMALL).shard_digest()
    local.add_(1)
    after = state.freeze(SMALL).shard_digest()
    assert after.shared == before.shared
    assert after.whole != before.whole
    shared.add_(1)
    assert state.freeze(SMALL).shard_digest().shared != before.shared
    payload = memoryview(bytearray(state.layout.payload_bytes))
    state.freeze(SMALL).write(payload)
    local.zero_()
    shared.zero_()
    assert state.read(payload) == SMALL
    assert local.tolist() == shared.tolist() == [1, 1, 1]


def test_state_that_changes_before_the_next_step_is_copied_at_once(state: RankState) -> None:
    torch.manual_seed(3)
    expected = state.digest(SMALL)
    frozen = state.freeze(SMALL)
    torch.rand(3)  # as dropout does in the next forward
    assert frozen.write(memoryview(bytearray(state.layout.payload_bytes))) == expected


def test_a_stopped_copy_raises(state: RankState) -> None:
    payload = memoryview(bytearray(state.layout.payload_bytes))
    with pytest.raises(CopyStopped):
        state.freeze(SMALL).write(payload, lambda: True)


def test_one_changed_bit_changes_the_digest(state: RankState, tensors: list[Tensor]) -> None:
    before = state.digest(SMALL)
    tensors[3].view(torch.int32)[2, 1] ^= 1
    assert state.digest(SMALL) != before
    assert state.digest({**SMALL, "step": 6}) != before


def test_the_layout_is_aligned_and_survives_json(state: RankState) -> None:
    layout = state.layout
    assert all(entry.offset % 64 == 0 for entry in layout.tensors)
    assert layout.tensors[-1].name == SMALL_STATE
    assert [entry.name for entry in layout.tensors if entry.per_rank] == ["random.cpu", SMALL_STATE]
    assert StateLayout.from_json(layout.to_json()) == layout


def test_an_empty_box_is_never_primary(state: RankState) -> None:
    assert [entry.primary for entry in state.layout.tensors[:4]] == [True, True, False, True]


def test_a_payload_of_another_size_is_refused(state: RankState) -> None:
    short = memoryview(bytearray(state.layout.payload_bytes - 64))
    with pytest.raises(StateMismatch, match="bytes"):
        state.read(short)
    with pytest.raises(StateMismatch, match="bytes"):
        state.freeze(SMALL).write(short)


def test_a_payload_without_small_state_changes_nothing(
    state: RankState, tensors: list[Tensor]
) -> None:
    before = tensors[0].clone()
    with pytest.raises(StateMismatch, match="JSON"):
        state.read(memoryview(bytearray(state.layout.payload_bytes)))
    assert torch.equal(tensors[0], before)


def test_a_tensor_that_does_not_fill_its_box_is_refused() -> None:
    box = ShardBox((2, 6), (0, 0), (2, 6), primary=True)
    with pytest.raises(StateMismatch, match="box"):
        RankState([StateTensor("w", torch.zeros(4, 6), box)])


@pytest.fixture
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("world_of_one")
def test_only_the_first_replica_of_a_box_is_primary() -> None:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp_shard",))
    sharded = distribute_tensor(torch.zeros(4), mesh, [Shard(0)])
    for tensor, coordinates, primary in (
        (sharded, {"dp_replicate": 0, "dp_shard": 1}, True),  # another box, not a replica
        (sharded, {"dp_replicate": 1, "dp_shard": 0}, False),
        (torch.zeros(4), {"dp_replicate": 0, "dp_shard": 0}, True),
        (torch.zeros(4), {"dp_replicate": 0, "dp_shard": 1}, False),
    ):
        assert shard_box_of(tensor, coordinates).primary is primary
