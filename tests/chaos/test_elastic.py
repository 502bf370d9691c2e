"""A world shrinks to the nodes that are left and grows again, in the living processes' memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as stock
from safetensors.numpy import load_file
from tests.support.nodes.history_proof import (
    assert_each_sample_once,
    incidents,
    meshes,
    scheduled,
)
from tests.support.nodes.supervised import small_training, supervised
from torch.distributed.checkpoint import FileSystemReader

from holdfast_service.job_model.supervisor_protocol import EventKind, StopKind
from holdfast_service.placement.world_shape import WorldShape
from holdfast_workers.checkpoint.export import plan_export, write_export
from holdfast_workers.checkpoint.manifest import Manifest, list_checkpoints, verify
from holdfast_workers.memory.segment_store import mesh_tag
from holdfast_workers.models.llama_parameters import parameter_shapes
from holdfast_workers.spec import (
    BYTE_VOCABULARY,
    CheckpointSpec,
    MemoryTierSpec,
    ParallelSpec,
    RemoteTierSpec,
)

pytestmark = pytest.mark.chaos

STEPS = 5000
"""More than a test waits for."""
SHAPES = tuple(WorldShape.of({"dp_shard": ranks, "tp": 1}, 1) for ranks in (4, 2))


STAGES = (SHAPES[0], WorldShape.of({"pp": 2, "dp_shard": 1, "tp": 1}, 1))
PIPELINES = tuple(WorldShape.of({"pp": 2, "dp_shard": n, "tp": 1}, 1) for n in (2, 1))


def elastic(
    folder: Path,
    *,
    every: int = 0,
    steps: int = STEPS,
    shapes: tuple[WorldShape, ...] = SHAPES,
    **config: Any,
) -> Any:
    """Four ranks on four nodes, which may become two."""
    checkpoint = CheckpointSpec(
        memory=MemoryTierSpec(every_steps=1), remote=RemoteTierSpec(every_steps=every, keep=9)
    )
    training = small_training(
        steps, blocks=2, checkpoint=checkpoint, parallel=ParallelSpec.model_validate(shapes[0].mesh)
    )
    options = {"shapes": shapes, "grow_after_s": 1.0, **config}
    return supervised(folder, training, standbys=0, workers_per_node=1, config=options)


def world_sizes(run: Any) -> list[int]:
    return [event["world_size"] for event in run.of(EventKind.ATTEMPT_FORMING)]


def saved_meshes(run: Any) -> set[int]:
    """`dp_shard` of the remote checkpoints."""
    return {event["mesh"]["dp_shard"] for event in run.of(EventKind.CHECKPOINT_SAVED)}


def meshes_in_memory(run: Any) -> set[str]:
    agents = run.agents
    return {held.mesh for seat in agents.seats for held in agents.report(seat).held}


def end_after(run: Any, steps: int) -> int:
    """Cancel the run after some further steps; the number of the last one."""
    run.wait_step(run.newest_step() + steps)
    run.stop(StopKind.CANCEL)
    return int(run.wait_end()["step"])


def lose_a_node_until_it_returns(run: Any, *, saves: bool) -> None:
    """The world shrinks from four ranks to two, loses a process, and grows again. With `saves`, the
    smaller world makes a remote checkpoint before it grows."""
    run.wait_step(15)
    lost = run.seat_of(3)
    # Copies at the partners may lag behind on a busy machine: none newer than a step that is gone
    # at its own rank would be a loss of memory, which is another test's subject.
    run.wait(lambda: run.rows[run.newest_step()].protected_step >= run.newest_step() - 1)
    run.agents.kill_node(lost)
    run.wait(lambda: world_sizes(run) == [4, 2] and len(incidents(run)) == 1)
    if saves:
        smaller = run.of(EventKind.ATTEMPT_FORMING)[-1]["mesh"]["dp_shard"]
        run.wait(lambda: smaller in saved_meshes(run))
    run.agents.return_node(lost)
    run.wait_step(run.newest_step() + 10)
    run.kill(1)
    run.wait(lambda: world_sizes(run)[-1] == 4 and len(incidents(run)) == 3)


@pytest.mark.parametrize(
    "shapes",
    [
        pytest.param(SHAPES, id="shards", marks=pytest.mark.cell("P3", "node")),
        pytest.param(PIPELINES, id="pipelines"),
        pytest.param(STAGES, id="shards to stages", marks=pytest.mark.soak),
    ],
)
def test_a_lost_node_shrinks_the_world_from_memory_and_its_return_grows_it(
    tmp_path: Path, shapes: tuple[WorldShape, ...]
) -> None:
    with elastic(tmp_path, every=20, shapes=shapes) as run:
        lose_a_node_until_it_returns(run, saves=True)
        run.wait(lambda: meshes_in_memory(run) == {mesh_tag(shapes[0].mesh)})
        last = end_after(run, 30)
        shrunk, _, grown = incidents(run)
        assert shrunk["decision"] == "shrink to a smaller mesh", run.story()
        assert set(shrunk["tiers"].values()) == {"reshard"}
        assert shrunk["steps_lost"] <= 1
        assert grown["decision"] == "grow to a larger mesh"
        assert grown["steps_lost"] == 0
        assert set(run.rows) == set(range(1, last + 1))
        assert_each_sample_once(run.training, run.rows, tmp_path)
        assert saved_meshes(run) == {shape.mesh["dp_shard"] for shape in shapes}, run.story()
        of_each_mesh = {}
        for manifest in list_checkpoints(run.remote):
            verify(run.remote.below(manifest.folder))
            of_each_mesh[str(manifest.mesh)] = manifest
        for manifest in of_each_mesh.values():
            assert_exported_and_readable(run, manifest)


def assert_exported_and_readable(run: Any, manifest: Manifest) -> None:
    """The export and torch's own reader have every parameter of the whole model, and the same."""
    target = run.folder / f"{manifest.folder}.safetensors"
    with target.open("w+b") as file:
        write_export(run.remote.below(manifest.folder), plan_export(manifest), file)
    exported = load_file(target)
    shapes = parameter_shapes(run.training.model, BYTE_VOCABULARY)
    assert {name: values.shape for name, values in exported.items()} == shapes
    state = {f"model.{name}": torch.zeros(shape) for name, shape in shapes.items()}
    stock.load(
        state, storage_reader=FileSystemReader(run.remote_root / manifest.folder), no_dist=True
    )
    for name, values in exported.items():
        assert np.array_equal(state[f"model.{name}"].numpy(), values), name


@pytest.mark.soak
def test_a_replay_of_the_same_meshes_without_faults_has_the_same_bits(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    with elastic(first) as run:
        lose_a_node_until_it_returns(run, saves=False)
        last = end_after(run, 20)
        history, plan = meshes(run), scheduled(run, SHAPES)
    assert [span.mesh for span in history] == [{"dp_shard": size} for size in (4, 2, 4)]
    with elastic(second, schedule=plan) as replay:
        replay.wait_step(last)
        end_after(replay, 1)
        assert meshes(replay) == history, replay.story()
        assert [incident["steps_lost"] for incident in incidents(replay)] == [0, 0]
    assert set(run.rows) == set(range(1, last + 1)) <= set(replay.rows)
    assert run.digests.items() <= replay.digests.items(), run.story()
    for step, row in run.rows.items():
        assert (row.samples, row.loss) == (replay.rows[step].samples, replay.rows[step].loss)
