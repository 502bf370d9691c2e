"""What tests of training assert of whole worlds: their curve, and their bits after a fault."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support.ranks import rank_programs as programs
from tests.support.ranks.rank_worlds import Worlds, world_of

from holdfast_workers.protocol.messages import StepRow
from holdfast_workers.spec import TrainingSpec

STOP = 4
"""The step in which a rank dies."""


def rows_of(worlds: Worlds, spec: TrainingSpec) -> list[StepRow]:
    """The rows of an undisturbed run, which is made once."""
    rows: list[StepRow] = worlds.once(programs.undisturbed, spec)[0]["rows"]
    return rows


def digests_of(worlds: Worlds, spec: TrainingSpec) -> dict[int, str]:
    digests: dict[int, str] = worlds.once(programs.undisturbed, spec)[0]["digests"]
    return digests


def assert_same_curve(alone: Sequence[StepRow], together: Sequence[StepRow]) -> None:
    for single, many in zip(alone, together, strict=True):
        assert many.loss == pytest.approx(single.loss, abs=1e-5)
        assert many.grad_norm == pytest.approx(single.grad_norm, rel=1e-4)
        assert many.samples == single.samples


def assert_one_curve(worlds: Worlds, alone: TrainingSpec, together: TrainingSpec) -> None:
    """A world follows the curve of one process, and all its ranks report the same digests."""
    assert_same_curve(rows_of(worlds, alone), rows_of(worlds, together))
    ranks = worlds.once(programs.undisturbed, together)
    assert all(rank["digests"] == ranks[0]["digests"] for rank in ranks)


def assert_rebinds(
    worlds: Worlds, spec: TrainingSpec, *, rebuild: bool, has_groups: bool = True
) -> None:
    """All ranks leave their groups after step 3 and go on in new ones. A model without FSDP and
    `tp` has no groups of its own to replace (`has_groups`)."""
    for result in worlds.run(programs.rebound, spec, STOP - 1, rebuild):
        assert result["digests"] == digests_of(worlds, spec)
        assert result["living"]
        assert result["same_tensors"] is not rebuild or not has_groups


def assert_replaced(
    worlds: Worlds,
    spec: TrainingSpec,
    folder: Path,
    expected: dict[int, str],
    program: Callable[..., Any],
    *of_victim: Any,
    resumed: Callable[..., Any] = programs.resumed,
) -> list[dict[str, Any]]:
    """The highest rank dies in step 4, as the program's arguments say; a new process takes its
    place, and the others go on in theirs. Returns what these returned."""
    attempt, world_size = worlds.next_attempt(), spec.parallel.world_size
    ranks = [
        worlds.start(program, world_of(spec, rank, attempt), spec, folder, *of_victim)
        for rank in range(world_size)
    ]
    ranks[-1].process.join(60)
    (folder / programs.LOST).touch()  # stages of a pipeline that are no neighbours wait on
    again = world_of(spec, world_size - 1, attempt + 1000)
    replacement = worlds.start(resumed, again, spec, folder, STOP - 1)
    assert replacement.result() == {step: expected[step] for step in expected if step >= STOP - 1}
    results: list[dict[str, Any]] = [rank.result() for rank in ranks[:-1]]
    for rank, result in zip(ranks, results, strict=False):
        assert result["digests"] == expected
        assert result["pid"] == rank.process.pid
    return results
