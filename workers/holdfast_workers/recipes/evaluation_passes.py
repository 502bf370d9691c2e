"""The forward passes of an evaluation, and the weights that they are made with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from holdfast_workers.models.transformer import BlockModel, Transformer
from holdfast_workers.parallelize.forward_stages import ForwardStages
from holdfast_workers.parallelize.pipeline import hidden_meta
from holdfast_workers.recipes.micro_batches import MicroBatch
from holdfast_workers.recipes.task import Task
from holdfast_workers.spec import TrainingSpec

Passes = Callable[[Sequence[MicroBatch], Callable[[int], None]], Sequence[Tensor]]
"""The loss of each micro-batch, summed over its targets; none on a rank that does not know them.
The second argument is called with the number of a micro-batch before a pass of it."""
Loss = Callable[[Tensor, Tensor], Tensor]


def passes_of_model(model: BlockModel, loss: Loss) -> Passes:
    """Of a model that is not divided into stages."""

    def passes(batches: Sequence[MicroBatch], begins: Callable[[int], None]) -> list[Tensor]:
        losses = []
        for number, batch in enumerate(batches):
            begins(number)
            losses.append(loss(model(batch.inputs), batch.targets))
        return losses

    return passes


def passes_of_stages(
    model: Transformer, spec: TrainingSpec, mesh: DeviceMesh, task: Task, loss: Loss
) -> Passes:
    """Of this rank's stages of a model."""

    def passes(batches: Sequence[MicroBatch], begins: Callable[[int], None]) -> list[Tensor]:
        inputs = [batch.inputs for batch in batches]
        hidden, outputs = task.shapes(inputs[0])
        shapes = (tuple(inputs[0].shape), hidden, outputs)
        passed_on = hidden_meta(spec, shapes, inputs[0].dtype)
        stages = ForwardStages(model, spec.parallel, mesh, passed_on)
        return stages.losses(inputs, [batch.targets for batch in batches], loss, begins)

    return passes


@contextmanager
def exchanged(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> Iterator[None]:
    """Inside, `tensors` have the values of `others`, which have theirs. It takes as much memory as
    the largest one."""
    _exchange(tensors, others)
    try:
        yield
    finally:
        _exchange(tensors, others)


@torch.no_grad()
def _exchange(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    for tensor, other in zip(tensors, others, strict=True):
        value = tensor.clone()
        tensor.copy_(other)
        other.copy_(value)
