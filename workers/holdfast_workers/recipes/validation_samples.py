"""The samples of an evaluation, and the micro-batches that a rank reads of them: a pure function of
the documents, the spec and the rank's place.

Batch `i` is always the same samples, dealt to the data-parallel ranks as a step's are. The last one
may have fewer than a global batch: missing rows have no targets, so that all shapes are training's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from holdfast_workers.data.sample_order import (
    Indices,
    passes,
    samples_digest,
)
from holdfast_workers.data.token_corpus import COLLECTIVE_SHARE, IGNORED, TokenCorpus, Waiting
from holdfast_workers.parallelize.mesh import data_parallel
from holdfast_workers.recipes.micro_batches import MicroBatch, dealt, placed
from holdfast_workers.spec import TrainingSpec, TrainSpec
from holdfast_workers.training.recipe import World

_BLOCK = 1 << 16


@dataclass(frozen=True)
class BatchShare:
    """What a rank's micro-batches of a batch depend on, besides the spec and the documents."""

    batch: int
    world: World


class ValidationSamples:
    """The first `most` samples of the documents of validation, or all."""

    def __init__(self, corpus: TokenCorpus, most: int) -> None:
        self._corpus = corpus
        self.samples = min(most, corpus.samples)
        self.fingerprint = corpus.fingerprint

    @classmethod
    def open(cls, spec: TrainingSpec, cache_dir: Path, waiting: Waiting) -> ValidationSamples:
        """Raises what `TokenCorpus.open_validation` raises."""
        corpus = TokenCorpus.open_validation(
            spec.data,
            cache_dir,
            spec.model.sequence_length,
            waiting=waiting,
            window_samples=spec.train.global_batch,
            window_patience_s=COLLECTIVE_SHARE * spec.detection.collective_timeout_s,
        )
        return cls(corpus, spec.evaluate.most_samples(spec.train.global_batch))

    @cached_property
    def targets(self) -> int:
        """Of all samples."""
        return sum(
            self._corpus.targets_of(self._corpus.order.samples_at(positions))
            for start in range(0, self.samples, _BLOCK)
            for positions in [np.arange(start, min(start + _BLOCK, self.samples), dtype=np.int64)]
        )

    def batches(self, train: TrainSpec) -> int:
        return -(-self.samples // train.global_batch)

    def passes(self, train: TrainSpec, world: World) -> int:
        """The micro-batches of a rank in each batch."""
        return passes(train.global_batch, train.micro_batch, data_parallel(world))

    def read(
        self, share: BatchShare, train: TrainSpec, own: Indices | None
    ) -> Iterator[MicroBatch]:
        """The micro-batches of a batch in their order; see `read_window`. Raises what
        `TokenCorpus.batch` raises."""
        start = share.batch * train.global_batch
        end = min(start + train.global_batch, self.samples)
        samples = self._corpus.samples_at(np.arange(start, end, dtype=np.int64))
        targets_of_batch = self._corpus.targets_of(samples)
        for of_window in dealt(share.batch, train, share.world):
            positions = of_window[of_window < end]
            read = samples[positions - start]
            digest = samples_digest(positions, read)
            batch = self._rows(read, train.micro_batch)
            yield placed(batch, own, share.world, len(read), digest, targets_of_batch)

    def _rows(self, samples: Indices, rows: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets (rows, sequence_length); those after the samples' have no targets."""
        inputs, targets = self._corpus.batch(samples)
        more = ((0, rows - len(samples)), (0, 0))
        return (
            torch.from_numpy(np.pad(inputs, more)),
            torch.from_numpy(np.pad(targets, more, constant_values=IGNORED)),
        )
