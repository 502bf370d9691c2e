"""What a family of models learns: its model, its data, and its loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import prod
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast_workers.data.corpus import CorpusError, open_corpus
from holdfast_workers.data.images import ImageSet, open_images
from holdfast_workers.data.sample_order import Indices, samples_at
from holdfast_workers.data.token_corpus import (
    COLLECTIVE_SHARE,
    IGNORED,
    OnWindow,
    TokenCorpus,
    Waiting,
)
from holdfast_workers.models import llama_parameters, vit_parameters
from holdfast_workers.models.library_model import UnfitModel, new_library_model
from holdfast_workers.models.llama import Llama
from holdfast_workers.models.transformer import BlockModel, initial_values
from holdfast_workers.models.vit import VisionTransformer
from holdfast_workers.published.weight_files import UnfitWeights
from holdfast_workers.spec import TrainingSpec


class Task(ABC):
    samples: int
    fingerprint: str
    """Fingerprint of the data, equal on all nodes."""
    targets_per_sample: int
    """At most; see `targets_of`."""
    tokens_per_sample: int
    """Positions of the sequence that a sample is in the model."""
    parameters: int | None = None
    """Number of parameters of the whole model; None: the work for a token is not known."""
    head_in_blocks: float = 0.0
    """The work of the model's head, as a number of blocks."""

    def __init__(self, spec: TrainingSpec) -> None:
        self._spec = spec

    @abstractmethod
    def new_model(self) -> BlockModel:
        """The whole model on the meta device."""

    def initial_values(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The whole parameter `name` at step 0."""
        return initial_values(name, shape, self._spec.model.layers, self._spec.train.seed)

    def samples_at(self, positions: Indices) -> Indices:
        """The sample at each position of the run; positions may span epochs."""
        return samples_at(positions, self.samples, self._spec.train.seed)

    def targets_of(self, samples: Indices) -> int:
        """The number of targets of these samples."""
        return len(samples) * self.targets_per_sample

    @abstractmethod
    def batch(self, samples: Indices) -> tuple[Tensor, Tensor]:
        """Inputs and targets of the samples, on the CPU."""

    @abstractmethod
    def stand_in(self) -> tuple[Tensor, Tensor]:
        """A micro-batch whose targets are ignored, for a rank for which none is left: it takes part
        in the passes of the others."""

    @abstractmethod
    def shapes(self, inputs: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of the hidden states and of the logits of a micro-batch."""

    @abstractmethod
    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The cross-entropy, summed over the targets."""


class _TextTask(Task):
    """The next token of a text, at every position: the families `llama` and `transformers`. A
    sample has `sequence_length` targets."""

    def __init__(self, spec: TrainingSpec, tokens: int) -> None:
        """`tokens`: the number of those that the tokenizer has."""
        super().__init__(spec)
        self._vocabulary = vocabulary = spec.model.vocabulary or tokens
        self.targets_per_sample = self.tokens_per_sample = spec.model.sequence_length
        if spec.model.family == "transformers":
            self._check_groups()
            return
        shapes = llama_parameters.parameter_shapes(spec.model, vocabulary)
        self.parameters = sum(prod(shape) for shape in shapes.values())
        self.head_in_blocks = llama_parameters.head_in_blocks(spec.model, vocabulary)

    def new_model(self) -> BlockModel:
        published = self._spec.model.published
        if self._spec.model.family == "transformers":
            assert published is not None and published.config is not None
            return new_library_model(published.config)
        with torch.device("meta"):
            return Llama(self._spec.model, self._vocabulary)

    def _check_groups(self) -> None:
        """Raises UnfitModel if no parameter belongs to a group of the optimizer."""
        optimizer = self._spec.train.optimizer
        names = [name for name, _ in self.new_model().named_parameters()]
        for group in optimizer.groups_without(names):
            raise UnfitModel(optimizer.describe_unused(group, names))

    def stand_in(self) -> tuple[Tensor, Tensor]:
        shape = (self._spec.train.micro_batch, self._spec.model.sequence_length)
        return torch.zeros(shape, dtype=torch.int64), torch.full(shape, IGNORED)

    def shapes(self, inputs: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
        rows = tuple(inputs.shape)
        return (*rows, self._spec.model.dim), (*rows, self._vocabulary)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(
            logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )


class LanguageTask(_TextTask):
    """Text whose tokens are its bytes, from files on the node."""

    def __init__(self, spec: TrainingSpec, cache_dir: Path) -> None:
        self._corpus = open_corpus(spec.data, cache_dir, spec.model.sequence_length)
        super().__init__(spec, self._corpus.vocabulary)
        self.samples = self._corpus.samples(spec.model.sequence_length)
        self.fingerprint = self._corpus.fingerprint

    def batch(self, samples: Indices) -> tuple[Tensor, Tensor]:
        """Both are (samples, sequence_length)."""
        tokens = torch.from_numpy(self._corpus.batch(samples, self._spec.model.sequence_length))
        return tokens[:, :-1], tokens[:, 1:]


class TokenTask(_TextTask):
    """Text of prepared token sets. The last sample of a shard may have fewer targets."""

    def __init__(
        self, spec: TrainingSpec, cache_dir: Path, waiting: Waiting, on_window: OnWindow
    ) -> None:
        self._corpus = TokenCorpus.open(
            spec.data,
            cache_dir,
            spec.model.sequence_length,
            spec.train.seed,
            waiting=waiting,
            window_samples=spec.train.global_batch,
            window_patience_s=COLLECTIVE_SHARE * spec.detection.collective_timeout_s,
            on_window=on_window,
            evaluated=spec.evaluate.most_samples(spec.train.global_batch),
        )
        super().__init__(spec, self._corpus.vocabulary)
        self.samples = self._corpus.samples
        self.fingerprint = self._corpus.fingerprint

    def samples_at(self, positions: Indices) -> Indices:
        return self._corpus.samples_at(positions)

    def targets_of(self, samples: Indices) -> int:
        return self._corpus.targets_of(samples)

    def batch(self, samples: Indices) -> tuple[Tensor, Tensor]:
        """Both are (samples, sequence_length)."""
        inputs, targets = self._corpus.batch(samples)
        return torch.from_numpy(inputs), torch.from_numpy(targets)


class ImageTask(Task):
    """The class of an image: the family `vit`. A sample is an image, with one target."""

    def __init__(self, spec: TrainingSpec, cache_dir: Path) -> None:
        super().__init__(spec)
        self._images: ImageSet = open_images(spec.data, cache_dir, spec.model.images)
        self.samples = self._images.samples
        self.fingerprint = self._images.fingerprint
        self.targets_per_sample = 1
        self.tokens_per_sample = spec.model.positions
        shapes = vit_parameters.vit_shapes(spec.model)
        self.parameters = sum(prod(shape) for shape in shapes.values())
        self.head_in_blocks = vit_parameters.head_in_blocks(spec.model)

    def new_model(self) -> VisionTransformer:
        with torch.device("meta"):
            return VisionTransformer(self._spec.model)

    def batch(self, samples: Indices) -> tuple[Tensor, Tensor]:
        """Images (samples, size, size, 3) of bytes and their classes (samples,)."""
        pixels, classes = self._images.batch(samples)
        return torch.from_numpy(pixels), torch.from_numpy(classes)

    def stand_in(self) -> tuple[Tensor, Tensor]:
        batch, size = self._spec.train.micro_batch, self._spec.model.images.image_size
        pixels = torch.zeros((batch, size, size, 3), dtype=torch.uint8)
        return pixels, torch.full((batch,), IGNORED)

    def shapes(self, inputs: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
        batch, model = inputs.shape[0], self._spec.model
        return (batch, model.positions, model.dim), (batch, model.images.classes)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="sum")


def new_task(spec: TrainingSpec, cache_dir: Path, waiting: Waiting, on_window: OnWindow) -> Task:
    """The task of a spec; `waiting`: for waits for data, here and in `batch`; `on_window`: for each
    window, if its data is fetched meanwhile. Raises CorpusError, UnfitWeights, UnfitModel."""
    if not spec.model.has_sizes:
        raise UnfitWeights(
            "model.from is not prepared: the server does so for a job that it starts; elsewhere, "
            "take the section `model` from the spec of such a job"
        )
    if spec.model.family == "vit":
        return ImageTask(spec, cache_dir)
    if spec.data.prepared:
        return TokenTask(spec, cache_dir, waiting, on_window)
    if spec.data.sources:
        raise CorpusError(
            "data.sources are not prepared: the server does so for a job that it starts; "
            "elsewhere, run `holdfast data prepare`, and set data.prepared as it says"
        )
    return LanguageTask(spec, cache_dir)
