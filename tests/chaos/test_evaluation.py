"""Faults in evaluations, and as training stops early, in real processes: the bits, each result and
the last step are those of an undisturbed world."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.data.token_sets import MadeSet, random_shards
from tests.support.nodes.supervised import SupervisedRun, small_training, supervised
from tests.support.ranks.rank_worlds import Worlds
from tests.support.ranks.world_checks import digests_of, rows_of

from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_workers.checkpoint.manifest import list_checkpoints
from holdfast_workers.checkpoint.open_storage import open_storage
from holdfast_workers.spec import (
    CheckpointSpec,
    DataSpec,
    EarlyStopSpec,
    EvaluateSpec,
    KeepBestSpec,
    RemoteTierSpec,
    SourceSpec,
    TrainingSpec,
)
from holdfast_workers.spec.train import ValidationSpec
from holdfast_workers.training.evaluation import EVALUATION_PHASE, LOSS

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]
STEPS, EVERY = 40, 4
WEB = MadeSet("web", random_shards(1, [3000, 4000]))
HELD = MadeSet("held", random_shards(2, [500, 900]))


def training(store: Path) -> TrainingSpec:
    data = DataSpec(
        sources=(SourceSpec(path="/web"),),
        prepared=(WEB.store(store / "web"),),
        validation=ValidationSpec(path="/held", prepared=HELD.store(store / "held")),
    )
    evaluate = EvaluateSpec(every_steps=EVERY, stop=EarlyStopSpec(patience=2))
    remote = RemoteTierSpec(every_steps=EVERY, keep=1, keep_best=KeepBestSpec(metric="eval_loss"))
    return small_training(
        STEPS, data=data, evaluate=evaluate, checkpoint=CheckpointSpec(remote=remote)
    )


def results(run: SupervisedRun) -> dict[int, float]:
    return {step: row.own[LOSS] for step, row in run.rows.items() if row.own}


def test_faults_in_evaluations_and_as_training_stops_early_change_neither_bits_nor_the_last_step(
    tmp_path: Path,
) -> None:
    spec = training(tmp_path / "store")
    (tmp_path / "cache").mkdir()
    for made in (WEB, HELD):
        made.put_into_cache(tmp_path / "cache")
    worlds = Worlds(tmp_path / "cache")
    expected = digests_of(worlds, spec)
    found = {row.step: row.own[LOSS] for row in rows_of(worlds, spec) if row.own}
    last = max(expected)
    best = min(found, key=lambda step: found[step])
    assert last == best + 2 * EVERY < STEPS
    kills: list[dict[str, Any]] = [
        {"point": point, "rank": rank, "step": step, "action": "kill"}
        for point, rank, step in (
            (EVALUATION_PHASE, 1, EVERY),
            (EVALUATION_PHASE, 0, last),  # before the decision
            ("committed", 2, last),
            ("checkpoint", 3, last),  # decided, and not saved
            ("agree", 1, last + 1),
            ("save", 2, last),
        )
    ]
    with supervised(tmp_path, spec, standbys=1, chaos=kills) as run:
        end = run.wait_end()
        assert (end["outcome"], end["code"], end["step"]) == ("SUCCEEDED", "stopped_early", last), (
            run.story()
        )
        assert run.digests == expected, run.story()
        assert results(run) == found
        assert all((tmp_path / f"chaos.json.{each}.0").exists() for each in range(len(kills)))
        saved = {event["step"] for event in run.of(EventKind.CHECKPOINT_SAVED)} - {last}
        kept = min(saved, key=lambda step: found[step], default=last)  # a save may have to wait
        stored = list_checkpoints(open_storage(str(run.remote_root)))
        assert {kept, last} <= {each.step for each in stored}
        assert all(each.metrics[LOSS] == found[each.step] for each in stored if each.metrics)
