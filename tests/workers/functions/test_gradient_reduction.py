"""A function's gradients are the mean over all ranks that read different samples, or it is refused.

`python -m benchmarks.function_matrix` runs all combinations; here are those that were wrong, and
the decision alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pytest
from benchmarks.function_matrix import run_case
from hypothesis import given
from hypothesis import strategies as st
from tests.support.ranks import function_programs as programs
from tests.support.ranks.rank_worlds import Worlds

from holdfast_workers.functions.gradient_reduction import axes_with, ranks_along
from holdfast_workers.spec import TrainingSpec
from holdfast_workers.training.recipe import World

FUNCTIONS = "tests.support.ranks.differing_functions"


def spec(name: str, mesh: Mapping[str, int], **config: Any) -> TrainingSpec:
    return TrainingSpec.model_validate(
        {
            "function": f"{FUNCTIONS}:{name}",
            "train": {"steps": 4, "global_batch": 12, "micro_batch": 2, "seed": 5},
            "parallel": mesh,
            "config": config,
        }
    )


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("division", "part", "mesh"),
    [
        ("ddp", "dropout", {"dp_replicate": 2}),
        ("plain", "heads by rank", {"dp_shard": 2}),
        pytest.param("tp by hand", "tied weights", {"dp_shard": 2}, marks=pytest.mark.slow),
        pytest.param(
            "ddp", "own backward", {"dp_replicate": 2, "dp_shard": 2}, marks=pytest.mark.slow
        ),
        pytest.param("ddp over all", "heads by rank", {"dp_replicate": 2}, marks=pytest.mark.slow),
        pytest.param("tp by hand", "frozen parts", {"dp_replicate": 2}, marks=pytest.mark.slow),
        pytest.param("fsdp2", "an idle head", {"dp_replicate": 2}, marks=pytest.mark.slow),
    ],
)
def test_a_function_has_the_losses_of_torch_and_the_same_bits_after_a_kill(
    worlds: Worlds, division: str, part: str, mesh: dict[str, int]
) -> None:
    result = run_case(worlds, division, part, mesh)
    assert result.is_right and not result.refused, result


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("name", "mesh", "message"),
    [
        ("wrapped_over_others", {"tp": 2}, "model.weight is in a DistributedDataParallel over"),
        ("divided_by_hand_over_data", {"dp_shard": 2}, "model.weight is divided over dp_shard"),
        (
            "leaves_the_last_micro_batch_out",
            {"dp_shard": 2},
            "no backward pass of its last",
        ),
    ],
)
def test_a_gradient_that_cannot_be_averaged_is_refused(
    worlds: Worlds, name: str, mesh: dict[str, int], message: str
) -> None:
    with pytest.raises(AssertionError, match=f"FunctionError: .*{message}"):
        worlds.run(programs.trained, spec(name, mesh))


@pytest.mark.seconds
def test_a_gradient_that_some_ranks_lack_is_refused_where_fsdp_would_add_it_to_another(
    worlds: Worlds,
) -> None:
    result = run_case(worlds, "fsdp2", "heads by rank", {"dp_shard": 2})
    assert result.refused.startswith("model.heads.a.weight has a gradient on 1 of 2 ranks only")


@pytest.mark.seconds
def test_uneven_micro_batches_are_weighted_or_refused(worlds: Worlds) -> None:
    uneven = {"steps": 4, "global_batch": 3, "micro_batch": 1, "seed": 5}

    def trained(by: str) -> list[Any]:
        document = spec("own_backward", {"dp_shard": 2}, by=by).model_dump() | {"train": uneven}
        return worlds.run(programs.trained, TrainingSpec.model_validate(document))

    by_context, by_weight = trained("context"), trained("weight")
    assert by_weight[0]["losses"] == pytest.approx(by_context[0]["losses"], rel=1e-6)
    assert by_weight[0]["digests"] == by_context[0]["digests"]
    with pytest.raises(AssertionError, match=r"FunctionError: .*multiply the loss of each"):
        trained("nothing")


MESHES = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)).map(
    lambda sizes: dict(zip(("dp_replicate", "dp_shard", "tp"), sizes, strict=True))
)


@given(MESHES, st.integers(0, 26), st.sets(st.sampled_from(("dp_replicate", "dp_shard", "tp"))))
def test_ranks_are_recognized_as_the_axes_along_which_they_lie(
    mesh: dict[str, int], rank: int, axes: set[str]
) -> None:
    size = mesh["dp_replicate"] * mesh["dp_shard"] * mesh["tp"]
    world = World(rank % size, size, mesh, 1, "cpu")
    ranks = ranks_along(world, tuple(axes))
    assert world.rank in ranks and list(ranks) == sorted(ranks)
    assert axes_with(world, ranks) == tuple(a for a in mesh if a in axes and mesh[a] > 1)


def test_ranks_that_are_no_part_of_the_mesh_are_not_recognized() -> None:
    mesh = {"dp_replicate": 2, "dp_shard": 2, "tp": 2}
    whole = [ranks_along(World(0, 8, mesh, 1, "cpu"), axes) for axes in _subsets(tuple(mesh))]
    for count in range(1, 9):
        for ranks in itertools.combinations(range(8), count):
            known = axes_with(World(0, 8, mesh, 1, "cpu"), ranks) is not None
            assert known == (ranks in whole)


def _subsets(axes: tuple[str, ...]) -> list[tuple[str, ...]]:
    return [each for n in range(len(axes) + 1) for each in itertools.combinations(axes, n)]
