"""Examples of the documentation that need no framework, with a rank killed in the middle; `make
frameworks` runs all of them, with every fault."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.programs.example_jobs import example_job, printed_losses

pytestmark = pytest.mark.chaos

STEPS = 30


@pytest.mark.parametrize("script", ["ddp.py", "fsdp2.py"])
def test_a_script_of_torchrun_has_the_same_losses_after_a_kill(tmp_path: Path, script: str) -> None:
    losses = []
    for name, is_killed in (("undisturbed", False), ("killed", True)):
        folder = tmp_path / name
        arguments = ["--steps", str(STEPS), "--pause", "0.02", "--folder", str(folder / "saved")]
        with example_job(folder, script, *arguments) as run:
            if is_killed:
                run.wait(lambda: max(printed_losses(run), default=0) >= 12)
                run.kill(1)
            assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
            losses.append(printed_losses(run))
    assert sorted(losses[0]) == list(range(1, STEPS + 1))
    assert losses[1] == losses[0]
