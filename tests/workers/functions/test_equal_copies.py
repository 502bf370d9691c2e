"""What several ranks hold of a function's state is compared, and a difference named."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.ranks import function_programs as programs
from tests.support.ranks.rank_worlds import RecordingHooks, Worlds
from tests.workers.functions.test_gradient_reduction import spec

from holdfast_workers.functions import FunctionError
from holdfast_workers.functions.equal_copies import (
    COMPARED_EVERY,
    HeldPart,
    first_difference,
    groups_of,
    is_due,
)


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("name", "mesh", "message"),
    [
        ("rate_by_rank", {"dp_shard": 2}, "object.optimizer differs between rank 0 and rank 1"),
        ("shape_by_rank", {"dp_shard": 2}, "part.weight is torch.float32 .3, 2. on rank 0 and"),
        ("half_by_rank", {"tp": 2}, "part.weight differs between rank 0 and rank 1"),
        ("changes_on_one_rank", {"dp_shard": 2}, "model.weight differs between rank 0 and rank 1"),
    ],
)
def test_ranks_that_differ_where_they_must_not_are_named(
    worlds: Worlds, name: str, mesh: dict[str, int], message: str
) -> None:
    with pytest.raises(AssertionError, match=f"FunctionError: .*{message}"):
        worlds.run(programs.trained, spec(name, mesh))


@pytest.mark.seconds
def test_objects_may_differ_and_a_line_says_which(worlds: Worlds) -> None:
    ranks = worlds.run(programs.printed, spec("object_by_rank", {"dp_shard": 2}))
    assert [line.partition(":")[0] for line in ranks[0] if "not the same" in line] == [
        "WARNING object.counter"
    ]
    assert not [line for line in ranks[1] if "not the same" in line]


def alone(name: str, **config: bool) -> RecordingHooks:
    return programs.trained_alone(spec(name, {}, **config), RecordingHooks())


def test_an_optimizer_that_grows_is_refused() -> None:
    with pytest.raises(FunctionError, match="add_param_group"):
        alone("adds_a_group")


def test_a_parameter_with_two_names_counts_once() -> None:
    once, twice = alone("two_names", twice=False), alone("two_names", twice=True)
    assert [row.grad_norm for row in twice.rows] == [row.grad_norm for row in once.rows]
    assert [row.loss for row in twice.rows] == [row.loss for row in once.rows]


def test_comparisons_become_rarer_and_never_end() -> None:
    due = [step for step in range(1, 4 * COMPARED_EVERY + 1) if is_due(step)]
    assert due == [1, 2, 4, 8, 16, 32, 64, 128, 192, 256]


OFFSETS = st.lists(st.integers(0, 2), min_size=1, max_size=8)


@given(OFFSETS, st.data())
def test_exactly_the_ranks_with_the_same_part_are_compared(
    offsets: list[int], data: st.DataObject
) -> None:
    parts = [HeldPart("w", str(torch.float32), (9,), (3 * offset,), (3,)) for offset in offsets]
    hashes = data.draw(st.lists(st.integers(0, 1), min_size=len(parts), max_size=len(parts)))
    differs = any(first_difference(group, hashes) for group in groups_of(parts))
    assert differs == any(
        offsets[a] == offsets[b] and hashes[a] != hashes[b]
        for a in range(len(parts))
        for b in range(a)
    )
