"""The Vision Transformer in real gloo worlds: it learns, on any mesh alike, with the same bits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.ranks import rank_programs as programs
from tests.support.ranks.rank_worlds import Worlds, tiny_vit_spec
from tests.support.ranks.toy_images import write_images
from tests.support.ranks.world_checks import STOP, assert_replaced, assert_same_curve, rows_of

from holdfast_workers.spec import find_faults

FULL = {"dp_shard": 2, "tp": 2}


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    folder = tmp_path_factory.mktemp("images")
    write_images(folder)
    os.environ["HOLDFAST_TEST_IMAGES"] = str(folder)
    yield Worlds(tmp_path_factory.mktemp("cache"))
    del os.environ["HOLDFAST_TEST_IMAGES"]


@pytest.fixture(scope="module")
def undisturbed(worlds: Worlds) -> dict[str, Any]:
    found: dict[str, Any] = worlds.once(programs.undisturbed, tiny_vit_spec(FULL, dropout=0.1))[0]
    return found


@pytest.mark.seconds
def test_it_learns_what_can_be_seen(worlds: Worlds) -> None:
    (run,) = worlds.once(programs.undisturbed, tiny_vit_spec({}, steps=60))
    losses = [row.loss for row in run["rows"]]
    assert sum(losses[:5]) / 5 > 1.2  # ln 4, of four classes
    assert sum(losses[-5:]) / 5 < 0.7
    assert run["rows"][0].tokens == 8 * 16


@pytest.mark.seconds
@pytest.mark.parametrize(
    "mesh",
    [
        FULL,
        {"dp_shard": 3},
        *(
            pytest.param(mesh, marks=pytest.mark.slow)
            for mesh in (
                {"tp": 2},
                {"dp_replicate": 2, "dp_shard": 2},
                {"dp_shard": 2, "zero": 3},
                {"tp": 2, "sequence_parallel": True},
                {"pp": 2, "tp": 2},
            )
        ),
    ],
    ids=str,
)
def test_every_mesh_follows_the_curve_of_one_process(worlds: Worlds, mesh: dict[str, Any]) -> None:
    spec = tiny_vit_spec(mesh)
    assert find_faults(spec) == []
    assert_same_curve(rows_of(worlds, tiny_vit_spec({})), rows_of(worlds, spec))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_activation_checkpointing_changes_no_bit(
    worlds: Worlds, undisturbed: dict[str, Any], mode: str
) -> None:
    spec = tiny_vit_spec(FULL, dropout=0.1, activation_checkpointing=mode)
    assert worlds.once(programs.undisturbed, spec)[0]["digests"] == undisturbed["digests"]


@pytest.mark.slow
def test_low_precision_and_compiled_blocks_stay_near_the_curve(worlds: Worlds) -> None:
    exact = worlds.once(programs.undisturbed, tiny_vit_spec({}))[0]["rows"]
    for mesh, changes in (({"dp_shard": 2}, {"dtype": "bfloat16"}), ({}, {"compile": True})):
        rows = worlds.once(programs.undisturbed, tiny_vit_spec(mesh, **changes))[0]["rows"]
        for single, other in zip(exact, rows, strict=True):
            assert other.loss == pytest.approx(single.loss, rel=2e-2)


@pytest.mark.chaos
@pytest.mark.parametrize("phase", ["backward", "in backward"])
def test_a_rank_killed_in_a_backward_pass_is_replaced_with_the_same_bits(
    worlds: Worlds, undisturbed: dict[str, Any], tmp_path: Path, phase: str
) -> None:
    spec = tiny_vit_spec(FULL, dropout=0.1)
    kill, expected = (phase, STOP), undisturbed["digests"]
    assert_replaced(worlds, spec, tmp_path, expected, programs.survivor, kill)
