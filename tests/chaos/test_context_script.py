"""A rank of a script that trains in the steps of a context is killed: survivors go on in place."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.support.nodes.history_proof import incidents, not_fired, processes, slept_on
from tests.support.nodes.supervised import SupervisedRun
from tests.support.programs.worlds import printed

from holdfast_workers.spec import (
    CheckpointSpec,
    MemoryTierSpec,
    ParallelSpec,
    ProgramSpec,
    RemoteTierSpec,
    TrainingSpec,
    TrainSpec,
)

pytestmark = pytest.mark.chaos
EXAMPLES = Path(__file__).parents[2] / "examples/bring"
STEPS = 24


def run_script(folder: Path, faults: list[dict[str, Any]]) -> SupervisedRun:
    training = TrainingSpec(
        script=("context.py", "--lr", "0.02"),
        program=ProgramSpec(context=True),
        train=TrainSpec(steps=STEPS, global_batch=8, micro_batch=2),
        parallel=ParallelSpec(dp_shard=2),
        checkpoint=CheckpointSpec(
            memory=MemoryTierSpec(every_steps=1), remote=RemoteTierSpec(every_steps=0)
        ),
    )
    shutil.copytree(EXAMPLES, folder / "code")
    return SupervisedRun(
        folder, training, standbys=0, workers_per_node=1, chaos=faults, code=str(folder / "code")
    )


def test_survivors_of_a_script_go_on_in_place_with_the_same_bits(tmp_path: Path) -> None:
    plan = [
        {"point": "backward", "rank": 1, "step": 9, "action": "kill"},
        {"point": "agree", "rank": 0, "step": 17, "action": "kill"},
    ]
    digests = []
    for name, faults in (("calm", []), ("faults", plan)):
        run = run_script(tmp_path / name, faults)
        try:
            assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
            printed(run, "rank 1 of 2 has finished, attempt " + ("3" if faults else "1"))
            digests.append(dict(run.digests))
            assert not not_fired(run, faults)
            assert len(incidents(run)) == len(faults), run.story()
            assert all(incident["steps_lost"] <= 1 for incident in incidents(run))
            worlds = processes(run)
            for incident, failed, before, after in zip(
                incidents(run), (1, 0), worlds, worlds[1:], strict=False
            ):
                assert before[failed] != after[failed]
                kept = before[1 - failed] == after[1 - failed]
                assert kept or slept_on(incident), "a survivor keeps its process"
        finally:
            run.close()
    assert digests[0] == digests[1] and sorted(digests[0]) == list(range(STEPS + 1))
