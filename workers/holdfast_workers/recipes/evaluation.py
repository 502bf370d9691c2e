"""Evaluates a model on the samples of validation, on the mesh that it is trained on.

Nothing that a later step depends on changes: no gradient is made, random generators are seeded anew
in each step, and the batches that training reads ahead are others'. Dropout is off meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from holdfast_workers.data.sample_order import Indices
from holdfast_workers.data.token_corpus import Waiting
from holdfast_workers.models.transformer import BlockModel
from holdfast_workers.parallelize.mesh import TENSOR_AXIS, data_index
from holdfast_workers.parallelize.pipeline import has_last_stage
from holdfast_workers.parallelize.shard import discard_step
from holdfast_workers.recipes.batches_ahead import BatchesAhead
from holdfast_workers.recipes.evaluation_function import EvaluationFunction
from holdfast_workers.recipes.evaluation_passes import Passes
from holdfast_workers.recipes.micro_batches import MicroBatch
from holdfast_workers.recipes.validation_samples import BatchShare, ValidationSamples
from holdfast_workers.spec import TrainingSpec
from holdfast_workers.training.early_stop import subject_of
from holdfast_workers.training.evaluation import EVALUATION_PHASE, EvaluationShare
from holdfast_workers.training.recipe import PhaseReporter, World


class Evaluation:
    """The evaluations of one training thread."""

    def __init__(
        self,
        spec: TrainingSpec,
        cache_dir: Path,
        waiting: Waiting,
        own_positions: Callable[[], Indices | None],
    ) -> None:
        """`own_positions`: the positions of each sequence that this rank computes; None for all.
        Raises CorpusError and DataUnavailable."""
        self._spec = spec.evaluate
        self._train = spec.train
        self._own_positions = own_positions
        self._samples = ValidationSamples.open(spec, cache_dir, waiting)
        self._batches = BatchesAhead(self._read)
        self._function = EvaluationFunction(spec.evaluate.function)

    def subject(self) -> int:
        """What is evaluated; see `subject_of`."""
        samples = self._samples
        return subject_of(self._spec, samples.fingerprint, samples.samples)

    def drop(self) -> None:
        """Discard what was read and added up."""
        self._batches.drop()
        self._function.take()

    def record(self, outputs: Tensor, targets: Tensor) -> None:
        """A pass has computed these outputs, on a rank that knows them."""
        self._function.add(outputs, targets)

    def share(
        self,
        model: BlockModel,
        world: World,
        step: int,
        passes: Passes,
        phase: PhaseReporter,
        check: Callable[[], None],
    ) -> EvaluationShare:
        """This rank's share of the evaluation of `step`. `check` may raise, and is called between
        passes. After an exception, `discard_step` must follow, as after that of a step."""
        loss_sum, count, digest, done = 0.0, 0, 0, 0
        with _evaluates(model):
            for batch in range(self._samples.batches(self._train)):
                read = self._taken(BatchShare(batch, world), check)
                first = done

                def begins(number: int, first: int = first) -> None:
                    check()
                    phase(EVALUATION_PHASE, step, first + number)

                for loss in passes(read, begins):
                    loss_sum += float(loss)
                count += sum(each.counted for each in read)
                digest += sum(each.digest for each in read)
                done += len(read)
        discard_step(model)  # its parameters are sharded again
        sums = self._function.take()
        # Of the ranks that know a loss; those of `cp`, of parts of it.
        tells = world.coordinate(TENSOR_AXIS) == 0 and has_last_stage(model)
        return EvaluationShare(
            loss_sum=loss_sum if tells else 0.0,
            count=count if tells else 0,
            data_index=data_index(world),
            samples=digest % (1 << 64),
            targets=self._samples.targets,
            documents=int(self._samples.fingerprint[:16], 16),
            sums=sums if tells else None,
        )

    def _taken(self, share: BatchShare, check: Callable[[], None]) -> list[MicroBatch]:
        self._batches.begin(share)
        if share.batch + 1 < self._samples.batches(self._train):
            self._batches.read_ahead(BatchShare(share.batch + 1, share.world))
        count = self._samples.passes(self._train, share.world)
        return [self._batches.take(check).on(share.world.device) for _ in range(count)]

    def _read(self, share: BatchShare) -> Iterator[MicroBatch]:
        return self._samples.read(share, self._train, self._own_positions())


@contextmanager
def _evaluates(model: BlockModel) -> Iterator[None]:
    """Inside, the model computes without dropout and gradients."""
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train()
