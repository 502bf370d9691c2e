"""What a family of models learns: its model, its data, and its loss."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from holdfast_workers.data.sample_order import Indices
from holdfast_workers.models.transformer import Transformer

IGNORED = -100
"""A target that no loss counts, as in torch's cross-entropy."""


class Task(Protocol):
    samples: int
    fingerprint: str
    """Fingerprint of the data, equal on all nodes."""
    targets_per_sample: int
    tokens_per_sample: int
    """Positions of the sequence that a sample is in the model."""
    parameters: int
    """Number of parameters of the whole model."""
    head_in_blocks: float
    """The work of the model's head, as a number of blocks."""

    def new_model(self) -> Transformer:
        """The whole model on the meta device."""
        ...

    def initial_values(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The whole parameter `name` at step 0."""
        ...

    def batch(self, samples: Indices) -> tuple[Tensor, Tensor]:
        """Inputs and targets of the samples, on the CPU."""
        ...

    def stand_in(self) -> tuple[Tensor, Tensor]:
        """A micro-batch whose targets are ignored, for a rank for which none is left: it takes part
        in the passes of the others."""
        ...

    def shapes(self, inputs: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of the hidden states and of the logits of a micro-batch."""
        ...

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss, summed over the targets."""
        ...
