"""`every_steps: auto` on real processes: the measured cost of saves determines their interval."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.nodes.supervised import small_training, supervised

from holdfast_service.job_model.supervisor_protocol import EventKind, StopKind
from holdfast_workers.spec import (
    FIRST_REMOTE_STEPS,
    CheckpointSpec,
    MemoryTierSpec,
    RemoteTierSpec,
)

pytestmark = [pytest.mark.chaos, pytest.mark.soak]


def test_an_expensive_remote_save_is_made_less_often_with_a_reported_reason(
    tmp_path: Path,
) -> None:
    """Each save delays a step by half a second; all ranks change the interval at the same step."""
    checkpoint = CheckpointSpec(
        memory=MemoryTierSpec(every_steps=0), remote=RemoteTierSpec(every_steps="auto")
    )
    training = small_training(
        4000, checkpoint=checkpoint, recipe="tests.support.ranks.recipes:CopiesVerySlowly"
    )
    with supervised(tmp_path, training, standbys=0) as run:

        def chosen() -> list[dict[str, Any]]:
            reported = run.of(EventKind.CHECKPOINT_INTERVAL)
            return [event for event in reported if event["cost_s"] is not None]

        run.wait(lambda: bool(chosen()))
        change = chosen()[-1]
        assert change["tier"] == "remote"
        assert change["every_steps"] > 5 * FIRST_REMOTE_STEPS
        assert change["cost_s"] > 0.02, run.story()
        assert change["every_steps"] * change["step_s"] >= change["cost_s"] / 0.01 * 0.99
        assert "a save costs" in change["why"]
        assert "apart" in change["why"]
        settled = max(run.rows) + 2 * change["before"]  # rank 0 reports it with one of its steps
        run.wait_step(settled + 3 * change["before"])
        saved = [event["step"] for event in run.of(EventKind.CHECKPOINT_SAVED)]
        late = [step for step in saved if step > settled and step % change["every_steps"]]
        assert late == [], run.story()
        run.stop(StopKind.CANCEL)
        assert run.wait_end()["durable_step"] == max(run.rows)
