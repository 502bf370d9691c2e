"""Pipelines in real gloo worlds: the curve of one process, and the same bits after faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.ranks import rank_programs as programs
from tests.support.ranks.rank_worlds import Worlds, tiny_spec
from tests.support.ranks.world_checks import STOP, assert_rebinds, assert_replaced, digests_of

SHARDED = {"pp": 2, "dp_shard": 2}
SCHEDULES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"pp": 4, "schedule": "gpipe"}, {"layers": 4}),
    (SHARDED, {}),
    ({"pp": 2, "tp": 2, "schedule": "interleaved"}, {"layers": 4}),
    ({**SHARDED, "schedule": "zero_bubble"}, {"layers": 4}),
]
"""Each schedule on a mesh: the section `parallel`, and what the model needs for it."""


@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "model"), SCHEDULES, ids=str)
@pytest.mark.parametrize(
    "rebuild",
    [pytest.param(False, id="in place"), pytest.param(True, id="rebuilt", marks=pytest.mark.soak)],
)
def test_stages_rebind_to_new_groups_with_the_same_bits(
    worlds: Worlds, parallel: dict[str, Any], model: dict[str, Any], rebuild: bool
) -> None:
    spec = tiny_spec(parallel, dropout=0.1, **model)
    has_groups = set(parallel) != {"pp", "schedule"}
    assert_rebinds(worlds, spec, rebuild=rebuild, has_groups=has_groups)


@pytest.mark.seconds
def test_every_rank_knows_the_loss_of_the_last_stage(worlds: Worlds) -> None:
    alone = worlds.once(programs.undisturbed, tiny_spec({}))[0]
    for outcome in worlds.once(programs.undisturbed, tiny_spec(SHARDED)):
        for row, expected in zip(outcome["rows"], alone["rows"], strict=True):
            assert row.samples == expected.samples
            assert row.loss == pytest.approx(expected.loss, abs=1e-5)
            assert row.grad_norm == pytest.approx(expected.grad_norm, abs=1e-5)


@pytest.mark.slow
def test_a_rank_without_a_micro_batch_takes_part_in_the_passes(worlds: Worlds) -> None:
    """Three data-parallel ranks share four micro-batches: two of them pass a stand-in on."""
    alone = worlds.once(programs.undisturbed, tiny_spec({}))[0]["rows"]
    rows = worlds.once(programs.undisturbed, tiny_spec({"pp": 2, "dp_shard": 3}))[0]["rows"]
    assert [row.samples for row in rows] == [row.samples for row in alone]
    assert rows[-1].loss == pytest.approx(alone[-1].loss, abs=1e-5)


@pytest.mark.slow
def test_the_update_waits_for_every_stage(worlds: Worlds) -> None:
    """A gradient that is not finite in the first stage is found after the last stage has finished
    its passes; an update of the last stage by then would be silently wrong."""
    spec = tiny_spec({"pp": 2})
    for message, unchanged, applied in worlds.run(programs.poisoned_in_backward, spec, 4):
        assert "not finite" in message or "nan" in message
        assert unchanged
        assert applied == 3


@pytest.mark.chaos  # on a busy machine, ranks do not wake in time
@pytest.mark.parametrize(
    ("schedule", "stages", "bubble"),
    [
        pytest.param("gpipe", 1, 3 / 11, marks=pytest.mark.soak),
        ("1f1b", 1, 3 / 11),
        pytest.param("interleaved", 2, 3 / 19, marks=pytest.mark.soak),
        ("zero_bubble", 2, 3 / 51),
    ],
)
def test_a_pipeline_waits_as_long_as_its_schedule_says(
    worlds: Worlds, schedule: str, stages: int, bubble: float
) -> None:
    """The share of time in which a rank waits, (P - 1) / (stages per rank · M + P - 1) for P ranks
    and M micro-batches; of ZBV, the time of P - 1 forward passes. Within 10% of the whole."""
    sleep_s, ranks, micro_batches = 0.04, 4, 8
    spec = tiny_spec({"pp": ranks, "schedule": schedule}, layers=ranks * stages)
    train = spec.train.model_copy(update={"global_batch": 2 * micro_batches})
    spec = spec.model_copy(update={"train": train})
    took_s = max(worlds.run(programs.sleeping_pipeline, spec, sleep_s))
    busy_s = 3 * sleep_s * stages * micro_batches
    print(f"{schedule}: bubble {1 - busy_s / took_s:.3f}, by formula {bubble:.3f}")
    assert took_s == pytest.approx(busy_s / (1 - bubble), rel=0.1)


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("schedule", "phase"),
    [
        pytest.param(1, "forward", marks=pytest.mark.soak),
        pytest.param(1, "backward", marks=pytest.mark.soak),
        pytest.param(1, "exchange", marks=pytest.mark.cell("P2", "pipeline stage")),
        pytest.param(1, "agree", marks=pytest.mark.soak),
        pytest.param(1, "optimizer", marks=pytest.mark.soak),
        pytest.param(0, "exchange", marks=pytest.mark.soak),
        (2, "backward"),
        (3, "forward"),
        pytest.param(3, "exchange", marks=pytest.mark.soak),
    ],
)
def test_a_killed_rank_of_a_pipeline_is_replaced_and_the_bits_are_the_same(
    worlds: Worlds, tmp_path: Path, schedule: int, phase: str
) -> None:
    parallel, model = SCHEDULES[schedule]
    spec = tiny_spec(parallel, dropout=0.1, **model)
    kill, expected = (phase, STOP), digests_of(worlds, spec)
    assert_replaced(worlds, spec, tmp_path, expected, programs.survivor, kill)
