"""The program of ranks that compute one step of several models; it returns plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tests.support.ranks import rank_programs as programs
from torch import Tensor

from holdfast_workers.parallelize import process_groups
from holdfast_workers.recipes.micro_batches import MicroBatch
from holdfast_workers.spec import TrainingSpec
from holdfast_workers.training.recipe import World

Array = NDArray[Any]


@dataclass(frozen=True)
class Computed:
    """What a rank has computed in one step."""

    world: World
    positions: Array
    """Those of each sequence that are its own."""
    inputs: list[Array]
    """The tokens of each micro-batch, (batch, own positions)."""
    targets: list[Array]
    logits: list[Array]
    """(batch, own positions, own vocabulary); none without the last stage of a pipeline."""
    gradients: dict[str, tuple[tuple[slice, ...], Array]]
    """This rank's piece of each."""


def computed(
    port: int,
    cache_dir: Path,
    world: World,
    spec: TrainingSpec,
    cases: Sequence[tuple[TrainingSpec, Mapping[str, Array]]],
) -> list[Computed]:
    """The first step of each spec, whose meshes have as many ranks as that of `spec`, on these
    weights."""
    programs.join(port, world)
    results = [_computed(cache_dir, world, *case) for case in cases]
    process_groups.leave()
    return results


def _computed(
    cache_dir: Path, world: World, spec: TrainingSpec, weights: Mapping[str, Array]
) -> Computed:
    own = World(world.rank, world.world_size, spec.parallel.mesh, world.attempt, "cpu")
    recipe = programs.make(cache_dir, spec)
    recipe.build(own)
    programs.begin(recipe)
    built = recipe._require_built()
    for name, box, local in zip(built.names, built.boxes, built.locals, strict=True):
        local.copy_(torch.from_numpy(weights[name])[box.slices()])
    batches: list[MicroBatch] = []
    logits: list[Array] = []
    read, loss = recipe._read, recipe._loss

    def recorded_read(step: int, micro_batch_index: int) -> MicroBatch:
        batches.append(read(step, micro_batch_index))
        return batches[-1]

    def recorded_loss(outputs: Tensor, targets: Tensor) -> Tensor:
        logits.append(outputs.detach().float().numpy())
        return loss(outputs, targets)

    recipe._read = recorded_read  # type: ignore[method-assign]
    recipe._loss = recorded_loss  # type: ignore[method-assign]
    recipe._forward_backward(1, lambda name, step, micro_batch=0: None)
    gradients = recipe.local_tensors("gradient")
    recipe.abandon_step()
    positions = recipe._own_positions(built)
    return Computed(
        world=own,
        positions=np.arange(spec.model.sequence_length) if positions is None else positions,
        inputs=[batch.inputs.numpy() for batch in batches],
        targets=[batch.targets.numpy() for batch in batches],
        logits=logits,
        gradients={
            name: (box.slices(), gradients[name].numpy())
            for name, box in zip(built.names, built.boxes, strict=True)
        },
    )
