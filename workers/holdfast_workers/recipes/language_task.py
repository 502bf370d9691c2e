"""The task of a language model: the next token of a text, at every position."""

from __future__ import annotations

from math import prod
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast_workers.data.corpus import Corpus, open_corpus
from holdfast_workers.data.sample_order import Indices
from holdfast_workers.models.llama import Llama, initial_values
from holdfast_workers.models.llama_parameters import head_in_blocks, parameter_shapes
from holdfast_workers.spec import TrainingSpec

IGNORED = -100
"""A target that no loss counts, as in torch's cross-entropy."""


class LanguageTask:
    """Model, data and loss of the family `llama`. A sample is `sequence_length` targets."""

    def __init__(self, spec: TrainingSpec, cache_dir: Path) -> None:
        self._spec = spec
        self._corpus: Corpus = open_corpus(spec.data, cache_dir, spec.model.sequence_length)
        self.samples = self._corpus.samples(spec.model.sequence_length)
        self.fingerprint = self._corpus.fingerprint
        self.targets_per_sample = spec.model.sequence_length
        shapes = parameter_shapes(spec.model, self._corpus.vocabulary)
        self.parameters = sum(prod(shape) for shape in shapes.values())
        self.head_in_blocks = head_in_blocks(spec.model, self._corpus.vocabulary)

    def new_model(self) -> Llama:
        """The whole model on the meta device."""
        with torch.device("meta"):
            return Llama(self._spec.model, self._corpus.vocabulary)

    def initial_values(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The whole parameter `name` at step 0."""
        return initial_values(name, shape, self._spec.model.layers, self._spec.train.seed)

    def batch(self, samples: Indices) -> tuple[Tensor, Tensor]:
        """Inputs and targets (samples, sequence_length), on the CPU."""
        tokens = torch.from_numpy(self._corpus.batch(samples, self._spec.model.sequence_length))
        return tokens[:, :-1], tokens[:, 1:]

    def stand_in(self) -> tuple[Tensor, Tensor]:
        """A micro-batch whose targets are ignored, for a rank for which none is left: it takes part
        in the passes of the others."""
        shape = (self._spec.train.micro_batch, self._spec.model.sequence_length)
        return torch.zeros(shape, dtype=torch.int64), torch.full(shape, IGNORED)

    def shapes(self, tokens: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of the hidden states and of the logits of a micro-batch."""
        rows = tuple(tokens.shape)
        return (*rows, self._spec.model.dim), (*rows, self._corpus.vocabulary)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The cross-entropy, summed over the targets (batch, sequence)."""
        return F.cross_entropy(
            logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )
