"""Each optimizer on a mesh makes the updates of one process, and its state survives faults and
moves to other meshes."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from tests.support.ranks import optimizer_programs as optimizers
from tests.support.ranks import rank_programs as programs
from tests.support.ranks.optimizer_programs import Whole, assembled, with_optimizer
from tests.support.ranks.rank_worlds import Worlds, tiny_spec
from tests.support.ranks.world_checks import STOP, assert_rebinds, assert_replaced, digests_of

from holdfast_workers.spec import OptimizerName, OptimizerSpec, TrainingSpec

NAMES: tuple[OptimizerName, ...] = get_args(OptimizerName)
SPECS = [
    OptimizerSpec.model_validate(
        {"name": name, "weight_decay": 0.1, "groups": [{"match": "*norm*", "lr_scale": 0.5}]}
    )
    for name in NAMES
]
ELEMENTWISE = {"adamw", "sgd", "lion", "muon"}
"""Muon's momentum is; its iteration gets the same whole matrix on any mesh."""
UNEVEN = {"dp_shard": 3}
"""Does not divide all shapes. Fused kernels compute the last elements of a piece, which fill no
vector of the processor, with other last bits."""
FULL = {"dp_shard": 2, "tp": 2}
STEPS = 20


def slow(*values: object) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def wholes_of(
    worlds: Worlds, mesh: Mapping[str, Any], steps: tuple[int, int], start: Path | None = None
) -> list[Whole]:
    """The whole state of each optimizer after `steps` on a mesh."""
    spec = tiny_spec(mesh, steps=STEPS)
    ranks = worlds.run(optimizers.driven, spec, SPECS, steps, start)
    return [assembled([rank[index] for rank in ranks]) for index in range(len(SPECS))]


@pytest.fixture(scope="module")
def alone(worlds: Worlds) -> list[Whole]:
    return wholes_of(worlds, {}, (1, STEPS))


def assert_same(
    name: OptimizerName, found: Whole, expected: Whole, *, is_even: bool = True
) -> None:
    assert found.keys() == expected.keys()
    for tensor, values in expected.items():
        if name in ELEMENTWISE and is_even:
            assert np.array_equal(found[tensor], values), f"{name}: {tensor}"
        else:
            assert np.allclose(found[tensor], values, rtol=2e-5, atol=1e-6), f"{name}: {tensor}"


@pytest.mark.seconds
@pytest.mark.parametrize(
    "mesh",
    [
        FULL,
        slow({"tp": 2, "vocabulary_parallel": True}),
        slow(UNEVEN),
        slow({"dp_replicate": 2}),
        slow({"dp_replicate": 2, "dp_shard": 2, "tp": 2}),
        slow({"dp_shard": 2, "cp": 2}),
        slow({"pp": 2, "dp_shard": 2}),
    ],
    ids=str,
)
def test_20_updates_on_a_mesh_are_those_of_one_process(
    worlds: Worlds, alone: list[Whole], mesh: dict[str, Any]
) -> None:
    found = wholes_of(worlds, mesh, (1, STEPS))
    for name, there, here in zip(NAMES, alone, found, strict=True):
        assert_same(name, here, there, is_even=mesh != UNEVEN)


@pytest.mark.seconds
def test_the_state_moves_to_another_mesh(
    worlds: Worlds, alone: list[Whole], tmp_path: Path
) -> None:
    start = tmp_path / "wholes"
    start.write_bytes(pickle.dumps(wholes_of(worlds, FULL, (1, 8))))
    for name, there, here in zip(
        NAMES, alone, wholes_of(worlds, {"dp_shard": 2}, (9, STEPS), start), strict=True
    ):
        assert_same(name, here, there)


def spec_of(name: str, mesh: Mapping[str, Any] = FULL) -> TrainingSpec:
    optimizer = OptimizerSpec.model_validate({"name": name, "lr": 1e-2})
    return with_optimizer(tiny_spec(mesh), optimizer, ema=0.9)


@pytest.mark.chaos
@pytest.mark.parametrize("name", ["muon", *map(slow, ("adafactor", "lamb", "lars", "lion", "sgd"))])
@pytest.mark.parametrize("phase", ["optimizer", slow("backward")])
def test_a_rank_may_die_where_the_others_update(
    worlds: Worlds, tmp_path: Path, name: str, phase: str
) -> None:
    spec = spec_of(name)
    expected = digests_of(worlds, spec)
    assert_replaced(worlds, spec, tmp_path, expected, programs.survivor, (phase, STOP))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["muon", "adafactor", "lamb"])
@pytest.mark.parametrize("rebuild", [False, True])
def test_survivors_rebind_to_new_groups_with_the_same_bits(
    worlds: Worlds, name: str, rebuild: bool
) -> None:
    assert_rebinds(worlds, spec_of(name), rebuild=rebuild)


@pytest.mark.seconds
def test_the_moving_average_of_the_weights_follows_its_formula(worlds: Worlds) -> None:
    assert worlds.run(optimizers.averages_follow, spec_of("sgd", {"dp_shard": 2})) == [True, True]


@pytest.mark.parametrize("mesh", [{"dp_shard": 2}, slow({"dp_replicate": 2})], ids=str)
def test_a_step_takes_no_more_memory_than_the_memory_model_has_for_it(
    worlds: Worlds, mesh: dict[str, int]
) -> None:
    spec = tiny_spec(mesh)
    for rank in worlds.run(optimizers.temporaries, spec, SPECS):
        for name, found in zip(NAMES, rank, strict=True):
            modelled = 1.0 if name == "muon" and mesh == {"dp_shard": 2} else 0.0
            assert found == pytest.approx(modelled, abs=0.3), name
