"""The examples of the documentation, unchanged, on two nodes: a rank is killed, a rank is stopped,
a node is lost. Every loss is then that of an undisturbed run: nothing of a step was lost."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.support.nodes.supervised import SupervisedRun
from tests.support.programs import environments
from tests.support.programs.example_jobs import EXAMPLES as EXAMPLES_FOLDER
from tests.support.programs.example_jobs import example_job, printed_losses, reported_losses
from tests.support.programs.played_world import played_world
from tests.support.programs.worlds import attempts, wait_next_attempt

from holdfast_service.job_model.supervisor_protocol import EventKind, StopKind

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(600)]

STEPS = 60
Losses = Callable[[SupervisedRun], dict[int, Any]]


@dataclass(frozen=True)
class Example:
    script: str
    pins: tuple[str, ...] = ()
    preload: tuple[str, ...] = ()
    losses: Losses = printed_losses

    @property
    def limits(self) -> dict[str, float]:
        """One that reports steps is known to hang by them, another by its silence."""
        if self.pins:
            return {"silence_s": 30.0, "step_limit_s": 2.0}
        return {"silence_s": 2.0}

    def job(self, folder: Path, **options: Any) -> Any:
        arguments = ["--steps", str(STEPS), "--pause", "0.05", "--folder", str(folder / "saved")]
        return example_job(
            folder,
            self.script,
            *arguments,
            pins=self.pins,
            preload=self.preload,
            program=self.limits,
            **options,
        )


EXAMPLES = {
    "ddp": Example("ddp.py"),
    "fsdp2": Example("fsdp2.py"),
    "lightning": Example("lightning_fit.py", environments.LIGHTNING, ("pytorch_lightning",)),
    "transformers": Example(
        "transformers_fit.py",
        environments.TRANSFORMERS,
        ("transformers", "accelerate"),
        reported_losses,
    ),
    "accelerate": Example("accelerate_fit.py", environments.TRANSFORMERS, ("accelerate",)),
}
WITH_PLUG_IN = [name for name, example in EXAMPLES.items() if example.pins]


@pytest.fixture(scope="module", params=EXAMPLES)
def example(request: pytest.FixtureRequest) -> Example:
    return EXAMPLES[request.param]


@pytest.fixture(scope="module")
def undisturbed(
    example: Example, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[int, Any]]:
    with example.job(tmp_path_factory.mktemp("undisturbed")) as run:
        assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
        losses = example.losses(run)
    assert sorted(losses) == list(range(1, STEPS + 1))
    yield losses


def test_losses_are_the_same_after_a_kill_a_hang_and_a_lost_node(
    tmp_path: Path, example: Example, undisturbed: dict[int, Any]
) -> None:
    with example.job(tmp_path, standbys=1) as run:
        wait_loss(run, example, 12)
        before = attempts(run)
        run.kill(1)
        wait_next_attempt(run, before)
        wait_loss(run, example, 25)
        before = attempts(run)
        os.kill(run.member(0)["pid"], signal.SIGSTOP)
        wait_next_attempt(run, before)
        wait_loss(run, example, 40)
        before, seat = attempts(run), run.seat_of(1)
        run.agents.kill_node(seat)
        wait_next_attempt(run, before)
        assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
        assert example.losses(run) == undisturbed
        causes = [incident["cause"] for incident in run.of(EventKind.INCIDENT_CLOSED)]
        assert causes[:2] == ["worker_crash", "hang"], causes
        assert len(causes) == 3


def test_losses_are_the_same_after_a_stop_on_request(
    tmp_path: Path, example: Example, undisturbed: dict[int, Any]
) -> None:
    """The plug-ins save and stop all ranks after the same step; the next run continues there."""
    if not example.pins:
        pytest.skip("a script without a plug-in ends by SIGTERM")
    with example.job(tmp_path / "first") as first:
        wait_loss(first, example, 13)
        first.stop(StopKind.PAUSE)
        first.wait(lambda: bool(first.of(EventKind.ENDED)))
        before = example.losses(first)
    (tmp_path / "second").mkdir()
    shutil.copytree(tmp_path / "first" / "saved", tmp_path / "second" / "saved")
    with example.job(tmp_path / "second") as second:
        assert second.wait_end()["outcome"] == "SUCCEEDED", second.story()
        after = example.losses(second)
    assert min(after) == max(before) + 1
    assert before | after == undisturbed


@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_a_checkpoint_in_memory_suffices(
    tmp_path: Path, example: Example, undisturbed: dict[int, Any], ranks_per_node: int
) -> None:
    """The checkpoints on the disk are gone when the world restarts."""
    if not example.pins:
        pytest.skip("a script without a plug-in keeps nothing in memory")
    interval = {"LIGHTNING_MEMORY_EVERY_STEPS": "5"}
    with example.job(tmp_path, workers_per_node=ranks_per_node, job_env=interval) as run:
        wait_loss(run, example, 13)
        run.kill(1)
        (tmp_path / "saved").rename(tmp_path / "gone")  # rank 0 may be writing there
        assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
        assert example.losses(run) == undisturbed
        assert min(row.step for row in run.all_rows if row.attempt == 2) > 5


def test_a_recorded_exception_is_the_cause_of_the_incident(tmp_path: Path) -> None:
    with example_job(tmp_path, "failing.py", "--folder", str(tmp_path / "saved")) as run:
        assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
        [incident] = run.of(EventKind.INCIDENT_CLOSED)
        assert "the learning rate 12 is too high" in str(incident)
        assert incident["lost"][0]["rank"] == 1


def test_a_script_of_the_other_package_of_lightning_is_watched_too(tmp_path: Path) -> None:
    arguments = ["--steps", "20", "--folder", str(tmp_path / "saved")]
    with example_job(
        tmp_path,
        "lightning_fit.py",
        *arguments,
        pins=environments.BOTH_LIGHTNINGS,
        changes={
            "import pytorch_lightning as pl": "import lightning.pytorch as pl",
            "from pytorch_lightning.callbacks": "from lightning.pytorch.callbacks",
        },
        job_env={"LIGHTNING_MEMORY_EVERY_STEPS": "5"},
    ) as run:
        assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
        assert sorted(run.rows) == list(range(1, 21))


@pytest.mark.parametrize("name", WITH_PLUG_IN)
def test_a_script_with_a_plug_in_runs_under_torchrun_too(tmp_path: Path, name: str) -> None:
    example = EXAMPLES[name]
    code = tmp_path / "code"
    code.mkdir()
    environments.write_entry_points(code)
    paths = [str(environments.modules_of(example.pins)), str(code), *sys.path]
    arguments = [str(EXAMPLES_FOLDER / example.script), "--folder", str(tmp_path / "saved")]
    for steps in (7, 12):
        with played_world(
            tmp_path,
            [*arguments, "--steps", str(steps)],
            environment={"PYTHONPATH": os.pathsep.join(filter(None, paths))},
            attached=False,
        ) as world:
            said = world.wait()
    assert not any("holdfast" in line.lower() for line in "\n".join(said).splitlines()), said


def wait_loss(run: SupervisedRun, example: Example, step: int) -> None:
    run.wait(lambda: max(example.losses(run), default=0) >= step, 120.0)
