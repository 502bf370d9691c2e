"""The task of a vision model: the class of an image."""

from __future__ import annotations

from math import prod
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast_workers.data.images import ImageSet, open_images
from holdfast_workers.data.sample_order import Indices
from holdfast_workers.models.transformer import initial_values
from holdfast_workers.models.vit import VisionTransformer
from holdfast_workers.models.vit_parameters import head_in_blocks, vit_shapes
from holdfast_workers.recipes.task import IGNORED
from holdfast_workers.spec import TrainingSpec


class ImageTask:
    """Model, data and loss of the family `vit`. A sample is an image, with one target."""

    def __init__(self, spec: TrainingSpec, cache_dir: Path) -> None:
        self._spec = spec
        self._images: ImageSet = open_images(spec.data, cache_dir, spec.model.images)
        self.samples = self._images.samples
        self.fingerprint = self._images.fingerprint
        self.targets_per_sample = 1
        self.tokens_per_sample = spec.model.positions
        self.parameters = sum(prod(shape) for shape in vit_shapes(spec.model).values())
        self.head_in_blocks = head_in_blocks(spec.model)

    def new_model(self) -> VisionTransformer:
        """The whole model on the meta device."""
        with torch.device("meta"):
            return VisionTransformer(self._spec.model)

    def initial_values(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The whole parameter `name` at step 0."""
        return initial_values(name, shape, self._spec.model.layers, self._spec.train.seed)

    def batch(self, samples: Indices) -> tuple[Tensor, Tensor]:
        """Images (samples, size, size, 3) of bytes and their classes (samples,), on the CPU."""
        pixels, classes = self._images.batch(samples)
        return torch.from_numpy(pixels), torch.from_numpy(classes)

    def stand_in(self) -> tuple[Tensor, Tensor]:
        """A micro-batch whose targets are ignored, for a rank for which none is left: it takes part
        in the passes of the others."""
        batch, size = self._spec.train.micro_batch, self._spec.model.images.image_size
        pixels = torch.zeros((batch, size, size, 3), dtype=torch.uint8)
        return pixels, torch.full((batch,), IGNORED)

    def shapes(self, images: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of the hidden states and of the logits of a micro-batch."""
        batch, model = images.shape[0], self._spec.model
        return (batch, model.positions, model.dim), (batch, model.images.classes)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The cross-entropy, summed over the images."""
        return F.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="sum")
