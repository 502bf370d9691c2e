"""Programs that do not attach: their steps come from printed lines and from event files."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from tests.support.programs.worlds import program_training, running_program

from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_workers.spec import ProgramSpec

pytestmark = pytest.mark.chaos

LOGGED = """
    import os
    from tensorboardX import SummaryWriter

    rank = os.environ["RANK"]
    with SummaryWriter(f"runs/{rank}") as writer:
        for step in (10, 20, 30):
            if rank == "0":
                writer.add_scalar("train/loss", 60.0 / step, step)
                writer.add_scalar("eval accuracy", 0.5, step)
"""
PRINTED = """
    for step in (10, 20, 30):
        print(f"[{step}/30] lr=1e-3 loss={60 / step}")
"""
SAVING = """
    import holdfast, torch, holdfast.torch

    job = holdfast.attach("of-test")
    job.step(1, loss=2.0, **{"acc": 0.5, "waiting_share": 1.0})
"""


def test_event_files_of_the_first_rank_become_rows(tmp_path: Path) -> None:
    training = program_training(script="a.py", program=ProgramSpec(event_files="runs/0"))
    with running_program(tmp_path, {"a.py": LOGGED}, training) as run:
        assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
        found = {step: (row.loss, row.own) for step, row in run.rows.items()}
        assert found == {step: (60 / step, {"eval_accuracy": 0.5}) for step in (10, 20, 30)}
        assert run.of(EventKind.PROGRAM_ATTACHED) == []


def test_lines_of_the_first_rank_become_rows(tmp_path: Path) -> None:
    pattern = r"\[(?P<step>\d+)/\d+\] lr=(?P<lr>\S+) loss=(?P<loss>\S+)"
    training = program_training(script="a.py", program=ProgramSpec(metrics=pattern))
    with running_program(tmp_path, {"a.py": PRINTED}, training) as run:
        assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
        assert {step: row.loss for step, row in run.rows.items()} == {10: 6.0, 20: 3.0, 30: 2.0}
        assert all(row.lr == 1e-3 and math.isnan(row.grad_norm) for row in run.rows.values())


def test_a_program_that_attaches_is_reported_once_with_its_plug_in(tmp_path: Path) -> None:
    with running_program(tmp_path, {"a.py": SAVING}, program_training(script="a.py")) as run:
        assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
        assert run.of(EventKind.PROGRAM_ATTACHED) == [
            {"attempt": 1, "level": 1, "integration": "of-test"}
        ]
        assert run.rows[1].own == {"acc": 0.5}
