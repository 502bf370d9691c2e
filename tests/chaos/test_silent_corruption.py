"""Bit flips in one replica: all ranks detect them at once; the rank is named, the step undone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.chaos.conftest import Undisturbed
from tests.support.nodes.history_proof import assert_same_history, incidents
from tests.support.nodes.supervised import SupervisedRun, small_training, supervised
from tests.support.ranks.flips import random_flips

from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_workers.spec import (
    CheckpointSpec,
    ModelSpec,
    ParallelSpec,
    RemoteTierSpec,
    ScheduleSpec,
    TrainingSpec,
    TrainSpec,
)

pytestmark = pytest.mark.chaos
STEPS = 60
MODEL = ModelSpec(dim=32, layers=2, heads=2, sequence_length=32, dropout=0.1)


def replicated(replicas: int, steps: int = STEPS, **changes: Any) -> TrainingSpec:
    """Small steps: these tests compare only bits."""
    fields: dict[str, Any] = {
        "recipe": "tests.support.ranks.flips:FlipsBits",
        "model": MODEL,
        "train": TrainSpec(
            steps=steps, global_batch=12, micro_batch=2, schedule=ScheduleSpec(warmup_steps=5)
        ),
        "parallel": ParallelSpec(dp_replicate=replicas),
    }
    return small_training(steps, **{**fields, **changes})


@contextmanager
def flipping(
    folder: Path,
    training: TrainingSpec,
    flips: list[dict[str, Any]],
    patch: pytest.MonkeyPatch,
    **options: Any,
) -> Iterator[SupervisedRun]:
    folder.mkdir(exist_ok=True)
    plan = folder / "flips.json"
    plan.write_text(json.dumps(flips))
    patch.setenv("HOLDFAST_TEST_FLIPS", str(plan))
    with supervised(folder, training, workers_per_node=1, **{"standbys": 0, **options}) as run:
        yield run


def undisturbed(folder: Path, training: TrainingSpec, patch: pytest.MonkeyPatch) -> Undisturbed:
    with flipping(folder / "undisturbed", training, [], patch) as run:
        assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
        assert not incidents(run), run.story()  # a long healthy run raises no alarm
        return Undisturbed(dict(run.digests), dict(run.rows))


def named(incident: dict[str, Any]) -> set[int]:
    """The ranks that the incident names as corrupted."""
    return {lost["rank"] for lost in incident["lost"] if lost["cause"] == "corruption"} - {None}


@pytest.mark.parametrize("replicas", [pytest.param(2, marks=pytest.mark.soak), 3])
def test_a_flipped_bit_is_found_within_three_steps_named_and_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replicas: int
) -> None:
    training = replicated(replicas)
    flips = random_flips(replicas, replicas, 9)
    whole = undisturbed(tmp_path, training, monkeypatch)
    # A short window: earlier flips of a node do not count against it.
    chances = {"window_s": 0.05}
    with flipping(tmp_path, training, flips, monkeypatch, config=chances) as run:
        assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
        assert_same_history(run, whole)
        found = incidents(run)
        assert {incident["cause"] for incident in found} == {"corruption"}, run.story()
        for flip in flips:
            # A flip during the copy of the previous step may be in that copy.
            steps = range(flip["step"] - 2, flip["step"] + 2)
            matching = [incident for incident in found if incident["restored_step"] in steps]
            assert matching, (flip, run.story())
            assert max(incident["steps_lost"] for incident in matching) <= 1
            assert set.union(*map(named, matching)) == {flip["rank"]}, (flip, run.story())
        assert len(run.of(EventKind.ATTEMPT_FORMING)) <= 1 + 2 * len(flips)


def test_a_third_node_arbitrates_between_two_that_always_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node of rank 0 flips the bit whenever it computes the step; the referee takes rank 1."""
    training = replicated(2, steps=30)
    whole = undisturbed(tmp_path, training, monkeypatch)
    flips = [flip_of("gradient", 0, 8, "optimizer", times=3)]
    with flipping(tmp_path, training, flips, monkeypatch, standbys=1) as run:
        assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
        assert_same_history(run, whole)
        assert set.union(*map(named, incidents(run))) == {0}, run.story()
        formed = [event["members"] for event in run.of(EventKind.ATTEMPT_FORMING)]
        assert formed[2][1]["agent"] not in {member["agent"] for member in formed[0]}, run.story()


@pytest.mark.cell("P4", "rank")
def test_no_tier_keeps_a_corrupt_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step is saved to the remote tier; the last flip is in the copy of the final step."""
    steps = 20
    checkpoint = CheckpointSpec(remote=RemoteTierSpec(every_steps=1, keep=100))
    training = replicated(2, steps=steps, checkpoint=checkpoint)
    whole = undisturbed(tmp_path, training, monkeypatch)
    flips = [flip_of("moment", 1, step, "optimizer") for step in (6, 11, steps)]
    chances = {"window_s": 0.05}
    with flipping(tmp_path, training, flips, monkeypatch, config=chances) as run:
        assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
        assert_same_history(run, whole)
        saved = {(event["step"], event["attempt"]) for event in run.of(EventKind.CHECKPOINT_SAVED)}
        bad = {event["uri"] for event in run.of(EventKind.CHECKPOINT_BAD)} - {""}
        corrupt = {
            (event["corrupt"]["step"], event["corrupt"]["attempt"])
            for event in run.of(EventKind.CHECKPOINT_BAD)
            if "corrupt" in event
        }
        assert {step for step, _ in corrupt} == {6, 11, steps}
        good = {pair for pair in saved if not any(_is_of(uri, *pair) for uri in bad)}
        assert not good & corrupt, run.story()
        for path in run.remote_root.glob("step-*"):
            if (path / ".metadata").exists() and not (path / "why-bad.txt").exists():
                assert not any(_is_of(str(path), *pair) for pair in corrupt), run.story()


def flip_of(tensor: str, rank: int, step: int, phase: str, times: int = 1) -> dict[str, Any]:
    return {
        "rank": rank,
        "step": step,
        "phase": phase,
        "tensor": tensor,
        "index": 4,
        "bit": 24,
        "times": times,
    }


def _is_of(uri: str, step: int, attempt: int) -> bool:
    return uri.endswith(f"step-{step:08d}.attempt-{attempt}")
