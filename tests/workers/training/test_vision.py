"""The Vision Transformer in real gloo worlds: it learns, on any mesh alike, with the same bits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.ranks import rank_programs as programs
from tests.support.ranks.rank_worlds import Worlds, tiny_vit_spec, world_of
from tests.support.ranks.toy_images import write_images

from holdfast_workers.spec import find_faults

FULL = {"dp_shard": 2, "tp": 2}
STOP = 4


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
    alone = worlds.once(programs.undisturbed, tiny_vit_spec({}))[0]["rows"]
    spec = tiny_vit_spec(mesh)
    assert find_faults(spec) == []
    together = worlds.once(programs.undisturbed, spec)[0]["rows"]
    for single, many in zip(alone, together, strict=True):
        assert many.loss == pytest.approx(single.loss, abs=1e-5)
        assert many.grad_norm == pytest.approx(single.grad_norm, rel=1e-4)
        assert many.samples == single.samples


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


@pytest.mark.slow
def test_survivors_rebind_to_new_groups_with_the_same_bits(
    worlds: Worlds, undisturbed: dict[str, Any]
) -> None:
    for result in worlds.run(programs.rebound, tiny_vit_spec(FULL, dropout=0.1), 3, False):
        assert result["digests"] == undisturbed["digests"]
        assert result["same_tensors"]


@pytest.mark.chaos
@pytest.mark.parametrize("phase", ["backward", "in backward"])
def test_a_rank_killed_in_a_backward_pass_is_replaced_with_the_same_bits(
    worlds: Worlds, undisturbed: dict[str, Any], tmp_path: Path, phase: str
) -> None:
    spec = tiny_vit_spec(FULL, dropout=0.1)
    attempt, arguments = worlds.next_attempt(), (spec, tmp_path, (phase, STOP))
    ranks = [
        worlds.start(programs.survivor, world_of(spec, r, attempt), *arguments) for r in range(4)
    ]
    ranks[3].process.join(60)
    replacement = worlds.start(
        programs.resumed, world_of(spec, 3, attempt + 1000), spec, tmp_path, STOP - 1
    )
    assert replacement.result() == {s: undisturbed["digests"][s] for s in range(STOP - 1, 7)}
    for rank in ranks[:3]:
        result = rank.result()
        assert result["digests"] == undisturbed["digests"]
        assert result["pid"] == rank.process.pid
