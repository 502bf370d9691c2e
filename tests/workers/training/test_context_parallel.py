"""Sequences that are divided over `cp`, in real gloo worlds: the curve of one process, and the same
bits after faults."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.ranks import context_programs as context
from tests.support.ranks import rank_programs as programs
from tests.support.ranks.rank_worlds import Worlds, tiny_spec
from tests.support.ranks.world_checks import (
    STOP,
    assert_one_curve,
    assert_rebinds,
    assert_replaced,
    digests_of,
)

from holdfast_workers.spec import (
    DetectionSpec,
    TrainingSpec,
    find_faults,
)


def in_soak(*values: object) -> Any:
    return pytest.param(*values, marks=pytest.mark.soak)


ONE = (in_soak("all_gather"), "ring", in_soak("ulysses"))
"""Every method in a soak, otherwise the one with most code."""
ALONE: Mapping[str, int] = {"cp": 2}
SHARDED: Mapping[str, int] = {"dp_shard": 2, "cp": 2}


def spec_of(mesh: Mapping[str, int], method: str, **model: Any) -> TrainingSpec:
    parallel: dict[str, Any] = {**mesh, "context_method": method}
    return tiny_spec(parallel, **{"dropout": 0.1, **model})


@pytest.mark.seconds
@pytest.mark.parametrize("method", ONE)
@pytest.mark.parametrize(
    "mesh",
    [{"cp": 3}, pytest.param({"dp_replicate": 2, "cp": 2, "tp": 2}, marks=pytest.mark.slow)],
    ids=str,
)
def test_a_divided_sequence_follows_the_curve_of_one_process(
    worlds: Worlds, mesh: Mapping[str, int], method: str
) -> None:
    model: dict[str, Any] = {"dim": 48, "heads": 24, "kv_heads": 12, "sequence_length": 24}
    spec = spec_of(mesh, method, dropout=0.0, **model)
    assert_one_curve(worlds, tiny_spec({}, **model), spec)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["all_gather", "ring"])
def test_positions_may_be_divided_in_any_order_but_all_must_know_it(
    worlds: Worlds, method: str
) -> None:
    alone = worlds.once(programs.undisturbed, tiny_spec({}))[0]["rows"]
    spec = spec_of({"cp": 2}, method, dropout=0.0)
    told = worlds.run(context.in_contiguous_order, spec, True)[0]
    assumed = worlds.run(context.in_contiguous_order, spec, False)[0]
    for single, many in zip(alone, told, strict=True):
        assert many.loss == pytest.approx(single.loss, abs=1e-5)
    # Such a mistake raises no error: the curve of one process is what shows it.
    assert abs(assumed[-1].loss - alone[-1].loss) > 1e-3


@pytest.mark.seconds
@pytest.mark.parametrize("mesh", [ALONE, {"cp": 2, "tp": 2, "sequence_parallel": True}], ids=str)
def test_ranks_drop_other_positions(worlds: Worlds, mesh: Mapping[str, int]) -> None:
    seeds = worlds.run(context.random_numbers, tiny_spec(mesh, steps=2))
    assert len(set(seeds)) == len(seeds)


@pytest.mark.slow
@pytest.mark.parametrize("method", ONE)
def test_low_precision_stays_near_the_curve(worlds: Worlds, method: str) -> None:
    exact = worlds.once(programs.undisturbed, tiny_spec({}))[0]["rows"]
    low = worlds.once(programs.undisturbed, spec_of(ALONE, method, dropout=0.0, dtype="bfloat16"))
    for single, other in zip(exact, low[0]["rows"], strict=True):
        assert other.loss == pytest.approx(single.loss, rel=2e-2)
        assert other.loss != single.loss


@pytest.mark.slow
@pytest.mark.parametrize("method", ONE)
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_activation_checkpointing_changes_no_bit(worlds: Worlds, mode: str, method: str) -> None:
    spec = spec_of(SHARDED, method, activation_checkpointing=mode)
    assert digests_of(worlds, spec) == digests_of(worlds, spec_of(SHARDED, method))


@pytest.mark.seconds
@pytest.mark.parametrize(
    "mesh",
    [
        SHARDED,
        {"cp": 3},  # does not divide all shapes
        {"dp_replicate": 2, "cp": 2},
        {"dp_replicate": 2, "dp_shard": 2, "cp": 2},
        {"dp_shard": 2, "cp": 2, "tp": 2},
    ],
    ids=str,
)
def test_each_element_of_the_state_is_primary_on_exactly_one_rank(
    worlds: Worlds, mesh: Mapping[str, int]
) -> None:
    counts: dict[str, Any] = {}
    for entries in worlds.run(context.boxes, tiny_spec(mesh, sequence_length=24)):
        for entry in entries:
            if entry.primary and not entry.per_rank:
                count = counts.setdefault(entry.name, np.zeros(entry.global_shape, int))
                pairs = zip(entry.offsets, entry.shape, strict=True)
                count[tuple(slice(start, start + size) for start, size in pairs)] += 1
    assert len([name for name in counts if name.startswith("model.")]) == 21
    assert {name for name, count in counts.items() if (count != 1).any()} == set()


@pytest.mark.slow
def test_a_state_of_another_mesh_is_restored(worlds: Worlds, tmp_path: Path) -> None:
    before = worlds.run(programs.undisturbed, tiny_spec({"dp_shard": 4}), tmp_path)[0]
    # The same boxes: the ranks of both axes share each parameter in one row.
    digests = worlds.run(programs.resumed, tiny_spec(SHARDED), tmp_path, 3)[0]
    assert digests[3] == before["digests"][3]
    assert sorted(digests) == [3, 4, 5, 6]


@pytest.mark.slow
def test_every_group_gets_the_configured_timeout(worlds: Worlds) -> None:
    detection = DetectionSpec(collective_timeout_s=77.0)
    spec = tiny_spec({**SHARDED, "tp": 2}).model_copy(update={"detection": detection})
    assert worlds.run(context.timeouts, spec) == [{77.0}] * 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "rebuild"),
    [
        pytest.param("all_gather", False, marks=pytest.mark.soak),
        ("ring", False),
        ("ulysses", False),
        ("all_gather", True),
    ],
)
@pytest.mark.parametrize("mesh", [pytest.param(ALONE, marks=pytest.mark.soak), SHARDED], ids=str)
def test_survivors_rebind_to_new_groups_with_the_same_bits(
    worlds: Worlds, mesh: Mapping[str, int], method: str, rebuild: bool
) -> None:
    assert_rebinds(worlds, spec_of(mesh, method), rebuild=rebuild)


@pytest.mark.slow
@pytest.mark.parametrize("method", ONE)
def test_gradients_of_a_broken_backward_pass_do_not_reach_the_next(
    worlds: Worlds, method: str
) -> None:
    spec = spec_of(SHARDED, method)
    for digests in worlds.run(programs.interrupted_in_backward, spec, 4, False):
        assert digests == digests_of(worlds, spec)


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("mesh", "method", "nth"),
    [
        in_soak(ALONE, "all_gather", 2),
        in_soak(SHARDED, "all_gather", 2),
        in_soak(ALONE, "ring", 2),  # in the forward pass of the second block
        in_soak(SHARDED, "ring", 3),  # in the backward pass: keys and values
        in_soak(ALONE, "ring", 4),  # in the backward pass: their gradients
        (SHARDED, "ring", 4),
        in_soak(SHARDED, "ulysses", 6),  # in the forward pass of the second block
        in_soak(ALONE, "ulysses", 9),  # in the backward pass
    ],
    ids=str,
)
def test_a_rank_killed_in_an_exchange_is_replaced_and_the_bits_are_the_same(
    worlds: Worlds, tmp_path: Path, mesh: Mapping[str, int], method: str, nth: int
) -> None:
    spec = spec_of(mesh, method)
    expected, dies = digests_of(worlds, spec), context.killed_in_exchange
    assert_replaced(worlds, spec, tmp_path, expected, dies, STOP, nth)


@pytest.mark.parametrize(
    ("parallel", "model", "message"),
    [
        (
            {"cp": 3},
            {},
            "sequence_length 256 is not divisible by 2 × cp 3 = 6: use a sequence_length of 252 or "
            "258, or a cp of 2 or 4",
        ),
        (
            {"cp": 4, "tp": 2, "sequence_parallel": True},
            {"sequence_length": 24},
            "sequence_length 24 is not divisible by 2 × tp 2 × cp 4 = 16: use a sequence_length of "
            "16 or 32, or a cp of 3 or 6",
        ),
        (
            {"cp": 4, "context_method": "ulysses"},
            {"kv_heads": 2},
            "kv_heads 2 / tp 1 = 2 is not divisible by cp 4, as context_method ulysses needs: use "
            "a cp of 2, or another method",
        ),
        (
            {"cp": 2},
            {"compile": True},
            "cp 2 cannot be combined with compile: use a cp of 1, or compile: false",
        ),
    ],
)
def test_a_sequence_that_cannot_be_divided_is_refused(
    parallel: dict[str, Any], model: dict[str, Any], message: str
) -> None:
    spec = TrainingSpec.model_validate({"parallel": parallel, "model": model})
    (fault,) = find_faults(spec)
    assert (fault.path, fault.message) == ("parallel.cp", message)


def test_a_training_function_divides_no_sequences_and_no_layers() -> None:
    spec = TrainingSpec.model_validate({"function": "a.b:train", "parallel": {"cp": 2, "pp": 2}})
    assert [fault.message for fault in find_faults(spec)] == [
        "cp 2 divides sequences of the built-in model only: use 1",
        "pp 2 divides layers of the built-in models only: use 1",
    ]


def test_the_nearest_legal_size_of_a_huge_axis_is_found_at_once() -> None:
    spec = TrainingSpec.model_validate(
        {"parallel": {"cp": 2**52}, "model": {"sequence_length": 2**53 - 1}}
    )
    assert find_faults(spec)[0].message.endswith("or a cp of 1")
