"""The first step of an attempt, reported before it is evaluated: `timeouts.first_step_s` is not for
the evaluation."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

from tests.support.data.token_sets import MadeSet, random_shards
from tests.support.nodes.agent_config import agent_config, join_order
from tests.support.ranks.rank_worlds import tiny_spec

from holdfast_workers.ipc import control_channel
from holdfast_workers.progress import beacon as beacons
from holdfast_workers.progress.beacon import Beacon
from holdfast_workers.protocol.messages import Restore, Tier
from holdfast_workers.protocol.processes import (
    JoinAttempt,
    StepReport,
    WorkerMessage,
    WorkerSignal,
)
from holdfast_workers.protocol.signals import FirstStep, WorkerDone, WorkerFailed
from holdfast_workers.recipes.pretrain import PretrainRecipe
from holdfast_workers.spec import DataSpec, EvaluateSpec, SourceSpec, TrainingSpec
from holdfast_workers.spec.train import ValidationSpec
from holdfast_workers.training.evaluation import EvaluationShare
from holdfast_workers.training.recipe import PhaseReporter
from holdfast_workers.worker.attempt import COLD_STEPS
from holdfast_workers.worker.main import Worker

WAIT_S = 60.0
WEB, HELD = (MadeSet(name, random_shards(seed, [275, 140])) for seed, name in enumerate(("a", "b")))


class WaitsToEvaluate(PretrainRecipe):
    """Evaluates once the test has allowed it."""

    def evaluate(self, step: int, phase: PhaseReporter) -> EvaluationShare:
        deadline = time.monotonic() + WAIT_S
        while not (self.cache_dir / "go-on").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return super().evaluate(step, phase)


class CannotEvaluate(PretrainRecipe):
    def evaluate(self, step: int, phase: PhaseReporter) -> EvaluationShare:
        if step == 2:
            raise ValueError("no such word")
        return super().evaluate(step, phase)


class NotesLearning(PretrainRecipe):
    """Notes of each evaluation whether hang limits are learned from its passes."""

    def evaluate(self, step: int, phase: PhaseReporter) -> EvaluationShare:
        share = super().evaluate(step, phase)
        of_process = beacons.current()
        assert of_process is not None
        with (self.cache_dir / "learned").open("a") as file:
            file.write(f"{step} {not of_process.cold}\n")
        return share


def evaluated_spec(cache: Path, every: int = 1, steps: int = 2) -> TrainingSpec:
    cache.mkdir()
    for made in (WEB, HELD):
        made.put_into_cache(cache)
    data = DataSpec(
        sources=(SourceSpec(path="/a"),),
        prepared=(WEB.prepared(),),
        validation=ValidationSpec(path="/b", prepared=HELD.prepared()),
    )
    evaluate = EvaluateSpec(every_steps=every)
    spec = tiny_spec({}, steps=steps, corpus="unused")
    return spec.model_copy(update={"data": data, "evaluate": evaluate})


@contextmanager
def trains(tmp_path: Path, recipe: PretrainRecipe) -> Iterator[Iterator[WorkerMessage]]:
    """A worker that trains by itself; gives what it sends until it is done or fails."""
    config = agent_config(tmp_path, training=recipe.spec).zygote_config
    ours, theirs = control_channel.pair()
    ours.settimeout(WAIT_S)
    path = beacons.path_of(tmp_path, "n0.abc.1")
    beacons.create(path)
    pid = os.fork()
    if pid == 0:
        ours.close()
        os._exit(Worker(theirs, config, recipe, Beacon(path), None, is_prepared=False).run())
    theirs.close()
    order = join_order(tmp_path / "segment", attempt=1, restore=Restore(Tier.INIT, 0))
    control_channel.send(ours, JoinAttempt(order))

    def messages() -> Iterator[WorkerMessage]:
        while True:
            message = control_channel.receive(ours, *get_args(WorkerMessage))
            yield message
            is_signal = isinstance(message, WorkerSignal)
            if is_signal and isinstance(message.detail, WorkerDone | WorkerFailed):
                return

    yield messages()
    ours.close()
    os.waitpid(pid, 0)


def test_the_first_step_is_reported_before_its_evaluation_and_its_row_after_it(
    tmp_path: Path,
) -> None:
    cache = tmp_path / "cache"
    seen: list[str] = []
    with trains(tmp_path, WaitsToEvaluate(evaluated_spec(cache), cache)) as messages:
        for message in messages:
            match message:
                case WorkerSignal(detail=FirstStep(step=step, committed=False)):
                    seen.append(f"first step {step}")
                    (cache / "go-on").touch()
                case StepReport(row=row):
                    seen.append(f"row {row.step}")
                case WorkerSignal(detail=WorkerDone()):
                    seen.append("done")
    assert seen == ["first step 1", "row 1", "row 2", "done"]


def test_an_error_in_an_evaluation_says_so_and_has_the_step_that_was_committed(
    tmp_path: Path,
) -> None:
    cache = tmp_path / "cache"
    with trains(tmp_path, CannotEvaluate(evaluated_spec(cache), cache)) as messages:
        *_, last = messages
    assert isinstance(last, WorkerSignal) and isinstance(last.detail, WorkerFailed)
    error = last.detail.error
    assert (error.type, error.step) == ("ValueError", 1)
    assert error.message == "in the evaluation of step 2: no such word"


def test_hang_limits_are_not_learned_from_an_attempts_first_evaluation(tmp_path: Path) -> None:
    """It may compile, and touch memory, long after the first steps."""
    cache = tmp_path / "cache"
    recipe = NotesLearning(evaluated_spec(cache, every=2 * COLD_STEPS, steps=6 * COLD_STEPS), cache)
    with trains(tmp_path, recipe) as messages:
        assert [*messages]
    found = [line.split()[1] for line in (cache / "learned").read_text().splitlines()]
    assert found == ["False", "True", "True"]
