"""Move plans between all small meshes: each element once, minimal bytes, balanced load."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from tests.support.memory.mesh_layouts import (
    RANDOM,
    Parameter,
    fill,
    layout_of,
    least_bytes,
    meshes,
    random_state,
)

from holdfast_workers.checkpoint.moves import (
    ModelMismatch,
    MoveSource,
    NotCovered,
    Plan,
    plan_moves,
)
from holdfast_workers.checkpoint.pieces import batches, gather, scatter, view_of
from holdfast_workers.state.layout import SMALL_STATE, StateLayout, TensorEntry

# Indivisible sizes, fewer rows than ranks, scalars, cuts of both dimensions, three dimensions.
PARAMETERS = (
    Parameter("embed", (13, 6)),
    Parameter("up", (10, 7), tp_dim=0),
    Parameter("down", (9, 11), tp_dim=1),
    Parameter("norm", (5,), dtype="float64"),
    Parameter("steps", (), dtype="int16"),
    Parameter("conv", (6, 5, 3), tp_dim=2, dtype="uint8"),
)
RANKS_PER_NODE = 2
MESHES = list(meshes(8))


STATE = random_state(PARAMETERS, seed=3)


@cache
def layouts(mesh: tuple[tuple[str, int], ...]) -> list[StateLayout]:
    sizes = dict(mesh)
    return [layout_of(PARAMETERS, sizes, rank) for rank in range(math.prod(sizes.values()))]


@cache
def payloads(mesh: tuple[tuple[str, int], ...]) -> list[bytes]:
    filled = []
    for layout in layouts(mesh):
        payload = memoryview(bytearray(layout.payload_bytes))
        fill(payload, layout, STATE)
        filled.append(bytes(payload))
    return filled


def key(mesh: dict[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(mesh.items())


def node_of(rank: int) -> str:
    return f"n{rank // RANKS_PER_NODE}"


def sources_for(rank: int, mesh: dict[str, int]) -> list[MoveSource]:
    """The payload of every old rank, on its own node and on its partner's node, the next one."""
    sources = []
    held = layouts(key(mesh))
    nodes = -(-len(held) // RANKS_PER_NODE)
    for old, layout in enumerate(held):
        replica = f"n{(old // RANKS_PER_NODE + 1) % nodes}"
        for holder in dict.fromkeys((node_of(old), replica)):
            sources.append(MoveSource(holder, old, layout, near=holder == node_of(rank)))
    return sources


def transferred(
    plan: Plan, target: StateLayout, sources: list[MoveSource], old: dict[str, int]
) -> memoryview:
    """The target's payload, transferred through the byte stream of a connection."""
    payload = memoryview(bytearray(target.payload_bytes))
    stage = np.zeros(64, dtype=np.uint8)
    for number, moves in plan.by_source().items():
        source = sources[number]
        raw = memoryview(payloads(key(old))[source.rank])
        ours = [view_of(payload, target.tensors[move.tensor], move.box) for move in moves]
        theirs = [
            view_of(raw, source.layout.tensors[move.source_tensor], move.box) for move in moves
        ]
        for there, here in zip(batches(theirs, 64), batches(ours, 64), strict=True):
            gather(there, stage)
            scatter(here, stage)
    return payload


@pytest.mark.parametrize("new", MESHES, ids=str)
def test_every_mesh_is_filled_from_every_other_with_minimal_network_bytes(
    new: dict[str, int],
) -> None:
    for old in MESHES:
        moved = least = 0
        for rank, target in enumerate(layouts(key(new))):
            sources = sources_for(rank, old)
            plan = plan_moves(target, sources, rank)
            assert plan.left == (RANDOM,)
            assert bytes(transferred(plan, target, sources, old)) == payloads(key(new))[rank], old
            writes = Counter(move.tensor for move in plan.moves for _ in range(move.box.volume))
            assert all(
                writes[index] == math.prod(entry.shape)
                for index, entry in enumerate(target.tensors)
                if entry.name != RANDOM
            )
            moved += sum(move.nbytes for move in plan.moves if not sources[move.source].near)
            least += least_bytes(target, [source.layout for source in sources if source.near])
        assert moved == least, old


def test_load_is_balanced_over_nodes_that_hold_the_same_boxes() -> None:
    wide = tuple(Parameter(f"w{index}", (64, 8)) for index in range(12))
    old, new = {"dp_replicate": 4, "dp_shard": 1, "tp": 1}, {"dp_replicate": 1, "tp": 1}
    layout = layout_of(wide, old, 0)
    sources = [MoveSource(f"n{rank}", rank, layout) for rank in range(4)]
    plan = plan_moves(layout_of(wide, {**new, "dp_shard": 1}, 0), sources, 0)
    load = {number: sum(m.nbytes for m in moves) for number, moves in plan.by_source().items()}
    assert len(load) == 4
    assert max(load.values()) <= 1.1 * sum(load.values()) / 4


def test_ranks_with_equal_targets_start_with_different_sources() -> None:
    parameters = (Parameter("w", (8, 8)),)
    mesh = {"dp_replicate": 4, "dp_shard": 1, "tp": 1}
    layouts = [layout_of(parameters, mesh, rank) for rank in range(4)]
    sources = [MoveSource(f"n{rank}", rank, layout) for rank, layout in enumerate(layouts)]
    first = {
        plan_moves(layout, sources, rank).moves[0].source for rank, layout in enumerate(layouts)
    }
    assert first == {0, 1, 2, 3}


def test_one_of_several_copies_on_a_node_serves_all_ranks() -> None:
    wide = tuple(Parameter(f"w{index}", (64, 8)) for index in range(12))
    mesh = {"dp_replicate": 4, "dp_shard": 1, "tp": 1}
    sources = [MoveSource(f"n{rank // 2}", rank, layout_of(wide, mesh, rank)) for rank in range(4)]
    for rank in range(4):
        plan = plan_moves(layout_of(wide, mesh, rank), sources, rank)
        assert set(plan.by_source()) == {0, 2}


def test_only_the_same_rank_takes_a_random_generator_state() -> None:
    mesh = {"dp_replicate": 1, "dp_shard": 2, "tp": 1}
    held = layouts(key(mesh))
    sources = [MoveSource(f"n{rank}", rank, layout) for rank, layout in enumerate(held)]
    plan = plan_moves(held[1], sources, 1, same_mesh=True)
    assert plan.left == ()
    random = next(i for i, entry in enumerate(held[1].tensors) if entry.name == RANDOM)
    assert {move.source for move in plan.moves if move.tensor == random} == {1}


@pytest.mark.parametrize(("same_mesh", "source"), [(True, 2), (False, 0)])
def test_a_rank_takes_its_own_local_values_or_on_another_mesh_those_of_the_primary(
    same_mesh: bool, source: int
) -> None:
    shape = (3,)
    entry = TensorEntry("mean", "float32", shape, (0,), shape, 0, 12, local=True)
    others = replace(entry, primary=False)
    layouts = [StateLayout((entry if rank == 0 else others,), 64) for rank in range(3)]
    sources = [MoveSource(f"n{rank}", rank, layout) for rank, layout in enumerate(layouts)]
    plan = plan_moves(layouts[2], sources, 2, same_mesh=same_mesh)
    assert [move.source for move in plan.moves] == [source]
    del sources[source]
    with pytest.raises(NotCovered):
        plan_moves(layouts[2], sources, 2, same_mesh=same_mesh)


def test_tensors_that_no_source_holds_are_named() -> None:
    mesh = {"dp_replicate": 1, "dp_shard": 3, "tp": 1}
    held = layouts(key(mesh))
    target = layouts(key({**mesh, "dp_shard": 1}))[0]
    sources = [MoveSource("n0", 0, held[0]), MoveSource("n2", 2, held[2])]
    with pytest.raises(NotCovered) as caught:
        plan_moves(target, sources, 0)
    assert caught.value.missing["embed"] == 5 * 6 * 4
    assert SMALL_STATE not in caught.value.missing


def test_a_tensor_of_another_shape_raises_model_mismatch() -> None:
    mesh = {"dp_replicate": 1, "dp_shard": 1, "tp": 1}
    other = layout_of((Parameter("embed", (13, 7)),), mesh, 0)
    with pytest.raises(ModelMismatch, match="embed"):
        plan_moves(layouts(key(mesh))[0], [MoveSource("n0", 0, other)], 0)


def test_a_strided_box_is_a_single_move() -> None:
    mesh = {"dp_replicate": 1, "dp_shard": 1, "tp": 2}
    tall = (Parameter("w", (4096, 8), tp_dim=1),)
    sources = [MoveSource(f"n{rank}", rank, layout_of(tall, mesh, rank)) for rank in range(2)]
    plan = plan_moves(layout_of(tall, {**mesh, "tp": 1}, 0), sources, 0)
    assert len([move for move in plan.moves if move.tensor == 0]) == 2
