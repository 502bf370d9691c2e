"""Many kills of a script that writes memory checkpoints beside training: no bit is lost."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
from tests.chaos.test_memory_tier import FSDP2, losses, resumed_at
from tests.support.programs.worlds import (
    attempts,
    printed,
    program_training,
    running_program,
    wait_next_attempt,
)

pytestmark = [pytest.mark.soak, pytest.mark.chaos]

STEPS = 250
KILLS = 20
TRAINING = program_training(script=f"train.py {STEPS}")
WIDE = (
    FSDP2.replace("Linear(16, 16)", "Linear(16, 40000)")
    .replace("Linear(16, 4)", "Linear(40000, 4)")
    .replace(
        "        dcp.save(state(step), storage_writer=kept.at(step))\n",
        "        if saving is not None:\n"
        "            saving.result()\n"
        "        saving = dcp.async_save(\n"
        "            state(step), storage_writer=kept.at(step), process_group=kept.group\n"
        "        )\n",
    )
    .replace("kept, done = tier(), 0", "kept, done, saving = tier(), 0, None")
    .replace("    dist.barrier()\n", "    saving.result()\n    dist.barrier()\n")
)


@pytest.mark.timeout(900)
def test_kills_at_any_moment_of_an_asynchronous_save_cost_no_bit(tmp_path: Path) -> None:
    seed = int(os.environ.get("HOLDFAST_TEST_SEED", str(time.time_ns() % 10**6)))
    print(f"HOLDFAST_TEST_SEED={seed}")
    chosen = random.Random(seed)
    config = {"max_failures": 10 * KILLS, "max_without_progress": KILLS}
    with running_program(tmp_path, {"train.py": WIDE}, TRAINING, config=config) as run:
        for number in range(KILLS):
            printed(run, f"step {(number + 1) * STEPS // (KILLS + 2)} ")
            time.sleep(chosen.uniform(0.0, 0.1))
            before = attempts(run)
            os.kill(run.member(chosen.randrange(2))["pid"], signal.SIGKILL)
            wait_next_attempt(run, before)
        assert run.wait_end(300)["outcome"] == "SUCCEEDED", run.story()
        starts = resumed_at(run.logs)
        found = losses(run.logs)
    with running_program(tmp_path / "calm", {"train.py": WIDE}, TRAINING) as calm:
        assert calm.wait_end(300)["outcome"] == "SUCCEEDED"
        assert losses(calm.logs) == found
    assert sorted(starts) == starts
    assert len(set(starts)) > KILLS // 2
