"""A function may wrap its model in torch's DDP: names, bits and faults as without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.ranks import function_programs as programs
from tests.support.ranks.rank_worlds import Worlds, world_of

from holdfast_workers.spec import TrainingSpec

STEPS = 6
PARAMETERS_OF_INNER, PARAMETERS_OF_WHOLE = 4, 6


def spec(wrapped: str, ranks: int = 2, **config: Any) -> TrainingSpec:
    return TrainingSpec.model_validate(
        {
            "function": "tests.support.ranks.functions:replicated",
            "train": {"steps": STEPS, "global_batch": 12, "micro_batch": 2, "seed": 5},
            "parallel": {"dp_shard": ranks},
            "config": {"wrapped": wrapped, **config},
        }
    )


@pytest.mark.seconds
def test_a_wrapped_model_has_the_names_and_bits_of_a_bare_one(
    worlds: Worlds,
) -> None:
    bare, inner, whole = (
        worlds.run(programs.trained, spec(wrapped)) for wrapped in ("", "inner", "whole")
    )
    assert "model.0.2.weight" in bare[0]["names"]
    assert not any("module" in name for name in bare[0]["names"])
    for rank in (*bare, *inner, *whole):
        assert rank["names"] == bare[0]["names"]
        assert rank["digests"] == bare[0]["digests"]


@pytest.mark.seconds
def test_only_a_steps_last_micro_batch_is_reduced_and_each_sum_is_counted(worlds: Worlds) -> None:
    for wrapped, parameters in (("inner", PARAMETERS_OF_INNER), ("whole", PARAMETERS_OF_WHOLE)):
        for rank in worlds.run(programs.trained, spec(wrapped)):
            assert rank["sums"] == parameters * STEPS


@pytest.mark.seconds
def test_a_step_that_leaves_out_its_last_micro_batch_is_averaged_too(worlds: Worlds) -> None:
    bare, whole = (
        worlds.run(programs.trained, spec(wrapped, breaks=True)) for wrapped in ("", "whole")
    )
    assert [rank["digests"] for rank in whole] == [rank["digests"] for rank in bare]
    assert whole[0]["digests"] == whole[1]["digests"]


@pytest.mark.seconds
@pytest.mark.parametrize(("saved", "loaded"), [("whole", ""), ("", "whole"), ("inner", "whole")])
def test_a_state_loads_with_and_without_the_wrapper(
    worlds: Worlds, tmp_path: Path, saved: str, loaded: str
) -> None:
    expected = worlds.run(programs.trained, spec(saved), tmp_path)[0]["digests"]
    for rank in worlds.run(programs.trained, spec(loaded), tmp_path, 3):
        assert rank["digests"] == {step: expected[step] for step in range(3, STEPS + 1)}


@pytest.mark.chaos
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_wrapped_model_works_again_after_a_rank_was_killed_in_its_backward_pass(
    worlds: Worlds, tmp_path: Path, ranks: int
) -> None:
    # With three, the bits of a sum depend on its place in the buffer.
    training, last = spec("whole", ranks), ranks - 1
    expected = worlds.run(programs.trained, training)[0]["digests"]
    attempt = worlds.next_attempt()
    started = [
        worlds.start(programs.survivor, world_of(training, r, attempt), training, tmp_path, 4)
        for r in range(ranks)
    ]
    started[last].process.join(60)
    replacement = worlds.start(
        programs.trained, world_of(training, last, attempt + 1000), training, tmp_path, 3
    )
    assert replacement.result()["digests"] == {s: expected[s] for s in range(3, STEPS + 1)}
    for rank in started[:last]:
        result = rank.result()
        assert result["digests"] == expected
        assert result["pid"] == rank.process.pid
