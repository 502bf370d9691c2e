"""A world shrinks to the nodes that are left and grows again, in the living processes' memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.nodes.history_proof import incidents
from tests.support.nodes.supervised import small_training, supervised

from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_service.placement.world_shape import WorldShape
from holdfast_workers.checkpoint.manifest import list_checkpoints, verify
from holdfast_workers.spec import CheckpointSpec, MemoryTierSpec, ParallelSpec, RemoteTierSpec

pytestmark = pytest.mark.chaos

STEPS = 160
SHAPES = tuple(WorldShape.of({"dp_shard": ranks, "tp": 1}, 1) for ranks in (4, 2))


def elastic(folder: Path, *, every: int = 0, steps: int = STEPS, **config: Any) -> Any:
    """Four ranks on four nodes, which may become two."""
    checkpoint = CheckpointSpec(
        memory=MemoryTierSpec(every_steps=1), remote=RemoteTierSpec(every_steps=every, keep=9)
    )
    training = small_training(steps, checkpoint=checkpoint, parallel=ParallelSpec(dp_shard=4, tp=1))
    options = {"shapes": SHAPES, "grow_after_s": 1.0, **config}
    return supervised(folder, training, standbys=0, workers_per_node=1, config=options)


def world_sizes(run: Any) -> list[int]:
    return [event["world_size"] for event in run.of(EventKind.ATTEMPT_FORMING)]


def test_a_lost_node_shrinks_the_world_from_memory_and_its_return_grows_it(tmp_path: Path) -> None:
    with elastic(tmp_path, every=20) as run:
        run.wait_step(15)
        lost = run.seat_of(3)
        run.agents.kill_node(lost)
        run.wait(lambda: len(incidents(run)) == 1)
        shrunk = incidents(run)[0]
        assert shrunk["decision"] == "shrink to a smaller mesh", run.story()
        assert set(shrunk["tiers"].values()) == {"reshard"}
        assert shrunk["steps_lost"] <= 1
        run.wait_step(run.newest_step() + 10)
        run.agents.return_node(lost)
        assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
        assert world_sizes(run) == [4, 2, 4], run.story()
        grown = incidents(run)[1]
        assert grown["decision"] == "grow to a larger mesh"
        assert grown["steps_lost"] <= 1
        assert set(run.rows) == set(range(1, STEPS + 1))
        saved = {event["mesh"]["dp_shard"] for event in run.of(EventKind.CHECKPOINT_SAVED)}
        assert saved == {2, 4}, run.story()
        for manifest in list_checkpoints(run.remote):
            verify(run.remote.below(manifest.folder))
