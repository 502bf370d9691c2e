"""Steps that compute beside the loading of their batches: the same loop for every side.

Imports nothing of Holdfast: peers run it with an interpreter of their own.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor

_WIDTH = 384
"""Of the matrices of a step: their product takes one to three milliseconds."""

Batch = tuple[Tensor, Tensor]
"""Inputs and targets (rows, sequence_length) of int64."""


@dataclass(frozen=True)
class LoopFigures:
    steps: int
    tokens: int
    """Of the targets."""
    waited_s: float
    total_s: float
    loading_s: float
    """Processor time of this process and of its children, less that of the steps' products."""

    @property
    def stall_share(self) -> float:
        return self.waited_s / self.total_s

    @property
    def tokens_per_s(self) -> float:
        """Per second of a processor that loading takes."""
        return self.tokens / self.loading_s


def beside_steps(batches: Iterator[Batch], warm_up: int, steps: int, step_s: float) -> LoopFigures:
    """Measure `steps` steps, after others. A step takes a batch, then computes on one thread until
    it has used `step_s` of processor time."""
    torch.set_num_threads(1)
    left, right = torch.rand(2, _WIDTH, _WIDTH)
    for _ in islice(batches, warm_up):
        _compute(left, right, step_s)
    workers = psutil.Process().children(recursive=True)
    waited = computed = 0.0
    tokens = 0
    began, used = time.perf_counter(), _processor_s(workers)
    for _ in range(steps):
        asked = time.perf_counter()
        _, targets = next(batches)
        waited += time.perf_counter() - asked
        tokens += targets.numel()
        computed += _compute(left, right, step_s)
    total = time.perf_counter() - began
    return LoopFigures(steps, tokens, waited, total, _processor_s(workers) - used - computed)


def window_digest(batches: Iterable[Batch]) -> tuple[int, int]:
    """The number of different windows in these batches, and a 64-bit sum over them that depends on
    each id and its place. A window that lacks targets is left out."""
    sums: list[NDArray[np.uint64]] = []
    for inputs, targets in batches:
        whole = (targets >= 0).all(1)
        rows = torch.cat([inputs, targets[:, -1:]], 1)[whole].numpy().astype(np.uint64)
        places = np.random.default_rng(0).integers(1, 1 << 63, rows.shape[1], np.uint64)
        sums.append((rows * places).sum(1, dtype=np.uint64))
    different = np.unique(np.concatenate(sums))
    return len(different), int(different.sum(dtype=np.uint64))


def _compute(left: Tensor, right: Tensor, step_s: float) -> float:
    """Returns the processor time of this thread."""
    began = time.thread_time()
    while (used := time.thread_time() - began) < step_s:
        torch.mm(left, right)
    return used


def _processor_s(workers: Sequence[psutil.Process]) -> float:
    """Processor time of this process and of these."""
    own = time.process_time()
    return own + sum(sum(worker.cpu_times()[:2]) for worker in workers)
