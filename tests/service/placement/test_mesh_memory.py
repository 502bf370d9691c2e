"""The memory of a rank: what each axis divides."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from holdfast_service.placement.mesh_memory import BUCKET_BYTES, MemoryModel
from holdfast_workers.byte_sizes import size_of
from holdfast_workers.parallelize import replicate
from holdfast_workers.spec import Zero

MODEL = MemoryModel(
    block=1000,
    blocks=4,
    whole=200,
    divided_activations=320,
    whole_activations=40,
    compute_bytes=4,
    gathers_blocks=False,
)
SIZES = st.integers(1, 64)


def test_each_part_is_divided_by_the_axes_that_divide_it() -> None:
    alone = MODEL.of({"dp_shard": 1, "tp": 1}, 8)
    assert (alone.parameters, alone.gradients, alone.moments) == (16_800, 16_800, 33_600)
    assert (alone.gathered, alone.activations) == (0, 4 * (4 * 80 + 40))
    shared = MODEL.of({"dp_replicate": 2, "dp_shard": 4, "tp": 2}, 8)
    assert shared.parameters == 4 * (4 * 500 + 200) // 4
    assert shared.gathered == 2 * 4 * (4 * 500 + 200)
    assert shared.activations == 4 * (4 * 40 + 40)
    assert shared.total == sum(
        (shared.parameters, shared.gradients, shared.moments, shared.gathered, shared.activations)
    )


def test_updates_follow_the_passes_in_the_same_memory() -> None:
    plain, muon = MODEL.of({"dp_shard": 4}, 8), replace(MODEL, exchanges_updates=True)
    shared = muon.of({"dp_shard": 4}, 8)
    assert (shared.updates, shared.total) == (shared.parameters, plain.total)
    assert "updates" not in shared.described
    few = replace(muon, divided_activations=0, whole_activations=0, compute_bytes=0)
    divided = few.of({"dp_shard": 1, "tp": 2}, 8)
    assert divided.total == divided.parameters * 5
    assert f"updates {size_of(divided.updates)}" in divided.described
    for mesh in ({"dp_shard": 1}, {"dp_replicate": 4}):
        assert muon.of(mesh, 8) == MODEL.of(mesh, 8)


def test_parts_of_a_sequence_share_activations_and_the_state() -> None:
    divided = MODEL.of({"dp_shard": 2, "cp": 2, "tp": 2}, 8)
    whole = MODEL.of({"dp_shard": 4, "tp": 2}, 8)
    assert replace(divided, activations=2 * divided.activations) == whole
    alone = MODEL.of({"dp_shard": 1, "cp": 4, "tp": 1}, 8)
    assert alone.gathered == MODEL.of({"dp_shard": 4}, 8).gathered
    gathers = replace(MODEL, gathered_activations=80)
    assert gathers.of({"dp_shard": 4, "tp": 2}, 8) == whole
    assert gathers.of({"dp_shard": 1, "cp": 4, "tp": 2}, 8).activations == 4 * (40 + 160 // 4)


def test_blocks_are_gathered_singly_only_where_a_step_has_one_pass() -> None:
    singly = replace(MODEL, gathers_blocks=True)
    assert singly.of({"dp_shard": 8}, 8).gathered == 2 * 4 * (2 * 1000 + 200)
    assert singly.of({"dp_shard": 4}, 8).gathered == MODEL.of({"dp_shard": 4}, 8).gathered


def test_a_divided_vocabulary_counts_with_the_layers() -> None:
    divided = replace(MODEL, whole=50, vocabulary=150)
    assert divided.of({"dp_shard": 2}, 8) == MODEL.of({"dp_shard": 2}, 8)
    need = divided.of({"dp_shard": 2, "tp": 2}, 8)
    assert need.parameters == 4 * (4 * 500 + 75 + 50 + 1) // 2
    assert need.gathered == 2 * 4 * (4 * 500 + 75 + 50)


def test_replicas_alone_gather_nothing_but_a_bucket_of_gradients() -> None:
    alone, replicas = MODEL.of({"dp_shard": 1}, 8), MODEL.of({"dp_replicate": 4, "dp_shard": 1}, 8)
    assert replicas == replace(alone, gathered=alone.gradients)
    large = replace(MODEL, block=10**9)
    assert large.of({"dp_replicate": 4}, 8).gathered == BUCKET_BYTES == replicate.BUCKET_BYTES
    low = replace(MODEL, compute_bytes=2).of({"dp_replicate": 4}, 8)
    assert low.gathered == 2 * 2 * (4 * 1000 + 200)


def test_zero_says_what_is_whole_during_a_step() -> None:
    whole, few = 4 * 1000 + 200, 2 * 1000 + 200
    cases: dict[Zero, int] = {1: whole + whole, 2: whole + few, 3: few + few}
    for zero, elements in cases.items():
        for gathers_blocks in (False, True):
            model = replace(MODEL, gathers_blocks=gathers_blocks, zero=zero)
            assert model.of({"dp_shard": 4}, 8).gathered == 4 * elements


@given(shards=SIZES, more=SIZES, tp=SIZES, replicas=SIZES)
def test_more_shards_never_need_more_memory_and_replicas_change_nothing_of_the_state(
    shards: int, more: int, tp: int, replicas: int
) -> None:
    few = MODEL.of({"dp_shard": 1 + shards, "tp": tp}, 10**6)
    many = MODEL.of({"dp_replicate": replicas, "dp_shard": shards + more + 1, "tp": tp}, 10**6)
    assert many.total <= few.total
