"""The micro-batches that a rank reads of a step: a pure function of the window of data, the rank's
place, the spec and the data. The samples of the whole global batch are looked up once.

Only numpy touches the data here: in a thread of its own, each operation of torch that is divided
among threads would start new ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast_workers.data.sample_order import (
    Indices,
    micro_batch_positions,
    passes,
    samples_digest,
)
from holdfast_workers.data.token_corpus import IGNORED
from holdfast_workers.parallelize.mesh import data_index, data_parallel
from holdfast_workers.recipes.task import Task
from holdfast_workers.spec import TrainSpec
from holdfast_workers.training.recipe import World


@dataclass(frozen=True)
class WindowShare:
    """What a rank's micro-batches of a step depend on, besides the spec and the data."""

    window: int
    """See `Ledger.window`."""
    world: World


@dataclass(frozen=True)
class MicroBatch:
    """What this rank reads of a micro-batch."""

    inputs: Tensor
    targets: Tensor
    samples: int
    """0 if no micro-batch is left for this rank."""
    counted: int
    """Its targets that the loss counts."""
    digest: int
    """See `samples_digest`."""
    targets_of_step: int
    """Targets of the whole global batch: the sum of what all ranks count."""

    def on(self, device: str) -> MicroBatch:
        """The same on the device. A copy from pinned memory does not wait for the device."""
        return replace(
            self,
            inputs=self.inputs.to(device, non_blocking=True),
            targets=self.targets.to(device, non_blocking=True),
        )


def read_window(
    share: WindowShare, task: Task, train: TrainSpec, own: Indices | None
) -> Iterator[MicroBatch]:
    """The micro-batches in their order, on the CPU: in pinned memory if the world's device is
    another. `own`: the positions of each sequence that the rank computes; None for all. Raises what
    `Task.batch` raises."""
    start = share.window * train.global_batch
    samples = task.samples_at(np.arange(start, start + train.global_batch, dtype=np.int64))
    targets_of_step = task.targets_of(samples)
    for positions in dealt(share.window, train, share.world):
        read = samples[positions - start]
        batch = task.batch(read) if len(read) else task.stand_in()
        digest = samples_digest(positions, read)
        yield placed(batch, own, share.world, len(read), digest, targets_of_step)


def dealt(window: int, train: TrainSpec, world: World) -> Iterator[Indices]:
    """The positions of a rank's micro-batches of a window, in their order."""
    index, ranks = data_index(world), data_parallel(world)
    for number in range(passes(train.global_batch, train.micro_batch, ranks)):
        yield micro_batch_positions(
            window,
            number,
            data_index=index,
            data_parallel=ranks,
            micro_batch=train.micro_batch,
            global_batch=train.global_batch,
        )


def placed(
    batch: tuple[Tensor, Tensor],
    own: Indices | None,
    world: World,
    samples: int,
    digest: int,
    targets_of_step: int,
) -> MicroBatch:
    """The micro-batch with these inputs and targets, at the positions `own`."""
    inputs, targets = (at_positions(whole, own) for whole in batch)
    place = pinned if world.device != "cpu" else torch.from_numpy
    return MicroBatch(
        inputs=place(inputs),
        targets=place(targets),
        samples=samples,
        counted=int(np.count_nonzero(targets != IGNORED)),
        digest=digest,
        targets_of_step=targets_of_step,
    )


def at_positions(whole: Tensor, own: Indices | None) -> NDArray[np.generic]:
    """The positions `own` of a tensor (samples, sequence) on the CPU; without them, all of it."""
    array: NDArray[np.generic] = whole.numpy()
    return array if own is None else np.take(array, own, axis=1)


def pinned(array: NDArray[np.generic]) -> Tensor:
    """A copy in memory from which a device copies by itself."""
    empty = torch.from_numpy(np.empty(0, array.dtype))
    copy = torch.empty(array.shape, dtype=empty.dtype, pin_memory=True)
    copy.numpy()[...] = array
    return copy
