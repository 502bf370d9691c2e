"""A function's gradients are the mean over all ranks that read different samples, or it is refused.

Every way to divide a model with every part that models have, on every mesh, is compared with the
same training in torch alone: the soak has all of these cases, the suites those that were wrong.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.ranks import function_programs as programs
from tests.support.ranks.function_cases import DIVISIONS, FUNCTION, PARTS, in_torch
from tests.support.ranks.rank_worlds import Worlds, world_of
from tests.support.waiting import DEADLINE_S

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


WRONG_ONCE = {
    ("ddp", "dropout", "dp_replicate"): pytest.mark.seconds,
    ("plain", "heads by rank", "dp_shard"): pytest.mark.seconds,
    ("tp by hand", "tied weights", "dp_shard"): pytest.mark.slow,
    ("ddp", "own backward", "dp_replicate dp_shard"): pytest.mark.slow,
    ("ddp over all", "heads by rank", "dp_replicate"): pytest.mark.slow,
    ("tp by hand", "frozen parts", "dp_replicate"): pytest.mark.slow,
    ("fsdp2", "an idle head", "dp_replicate"): pytest.mark.slow,
}
CASES = [
    pytest.param(*case, marks=WRONG_ONCE.get(case, pytest.mark.soak))
    for case in itertools.product(
        DIVISIONS, PARTS, ("dp_shard", "dp_replicate", "dp_replicate dp_shard")
    )
    if case[:2] != ("fsdp2", "heads by rank")
]


@pytest.mark.parametrize(("division", "part", "axes"), CASES)
def test_a_function_has_the_losses_of_torch_and_the_same_bits_after_a_kill(
    worlds: Worlds, tmp_path: Path, division: str, part: str, axes: str
) -> None:
    """Of the survivors of the kill, and of the process that replaces the killed one."""
    case = case_of(division, part, axes)
    calm, last = worlds.run(programs.trained, case), case.parallel.world_size - 1
    assert calm[0]["losses"] == pytest.approx(worlds.run(in_torch, case)[0], abs=1e-5)
    attempt, killed_in = worlds.next_attempt(), 3
    ranks = [
        worlds.start(
            programs.survivor, world_of(case, rank, attempt), case, tmp_path, killed_in, False
        )
        for rank in range(last + 1)
    ]
    ranks[last].process.join(DEADLINE_S)
    replacement = world_of(case, last, attempt + 1000)
    ranks[last] = worlds.start(programs.trained, replacement, case, tmp_path, killed_in - 1)
    for digests in (rank.result()["digests"] for rank in ranks):
        assert digests == {step: calm[0]["digests"][step] for step in digests}
        assert case.train.steps in digests


def case_of(division: str, part: str, axes: str) -> TrainingSpec:
    """Four micro-batches a step on two data-parallel ranks, two on four."""
    mesh = dict.fromkeys([*axes.split(), *(["tp"] if division == "tp by hand" else [])], 2)
    return TrainingSpec.model_validate(
        {
            "function": FUNCTION,
            "train": {"steps": 5, "global_batch": 16, "micro_batch": 2, "seed": 5},
            "parallel": mesh,
            "config": {"division": division, "part": part},
        }
    )


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
    lacking = "FunctionError: .*model.heads.a.weight has a gradient on 1 of 2 ranks only"
    with pytest.raises(AssertionError, match=lacking):
        worlds.run(programs.trained, case_of("fsdp2", "heads by rank", "dp_shard"))


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
