"""A job that trains on images loses ranks, and ends with the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.nodes.history_proof import incidents, not_fired
from tests.support.nodes.supervised import small_training, supervised
from tests.support.ranks.toy_images import write_images

from holdfast_workers.spec import DataSpec, ModelSpec, TrainingSpec

pytestmark = pytest.mark.chaos
STEPS = 20
KILLS = [
    {"point": "backward", "rank": 1, "step": 6, "action": "kill"},
    {"point": "optimizer", "rank": 2, "step": 12, "action": "kill"},
]


def on_images(folder: Path) -> TrainingSpec:
    write_images(folder, size=32)
    model = ModelSpec(
        family="vit", dim=64, layers=2, heads=4, image_size=32, patch_size=8, classes=4, dropout=0.1
    )
    return small_training(STEPS, model=model, data=DataSpec(source=str(folder)))


def test_a_vision_job_that_loses_ranks_has_the_same_bits(tmp_path: Path) -> None:
    training = on_images(tmp_path / "images")
    digests = []
    for name, plan in (("calm", []), ("faulted", KILLS)):
        folder = tmp_path / name
        folder.mkdir()
        with supervised(folder, training, standbys=0, chaos=plan) as run:
            end = run.wait_end()
            assert end["outcome"] == "SUCCEEDED", run.story()
            assert not not_fired(run, plan)
            assert len(incidents(run)) == len(plan), run.story()
            digests.append(run.digests)
    assert sorted(digests[0]) == list(range(STEPS + 1))
    assert digests[1] == digests[0]
