"""The section `model`: a built-in model of a family, as it is without parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from holdfast_workers.spec.fields import Positive, Section

ActivationCheckpointing = Literal["none", "full", "selective"]


class RopeScalingSpec(Section):
    """Rotary positions for longer sequences than a model was first trained on."""

    type: Literal["linear", "llama3"] = Field(
        description="linear: every frequency is divided by `factor` (position interpolation). "
        "llama3: only low frequencies are, as in Llama 3.1."
    )
    factor: Annotated[float, Field(ge=1)] = 8.0
    low_freq_factor: Annotated[float, Field(gt=0)] = Field(
        default=1.0,
        description="llama3: a wave longer than `original_sequence_length` by this is divided "
        "wholly.",
    )
    high_freq_factor: Annotated[float, Field(gt=0)] = Field(
        default=4.0,
        description="llama3: a wave shorter than `original_sequence_length` by this is kept.",
    )
    original_sequence_length: Positive = Field(
        default=8192, description="llama3: the sequence length of the first training."
    )


Family = Literal["llama", "vit"]


class ModelSpec(Section):
    family: Family = Field(
        default="llama",
        description="llama: a language model, of bytes of text. vit: a Vision Transformer, which "
        "classifies images.",
    )
    dim: Positive = 128
    layers: Annotated[int, Field(ge=1, le=10_000)] = 4
    heads: Positive = 4
    kv_heads: Positive | None = Field(
        default=None, description="Number of key and value heads. null: the same as `heads`."
    )
    ffn_dim: Positive | None = Field(
        default=None,
        description="Hidden size of the feed-forward layer. null: 8/3 of `dim`, rounded up to a "
        "multiple of 64; for vit 4 times `dim`.",
    )
    sequence_length: Positive = 256
    image_size: Positive | None = Field(
        default=None, description="vit: height and width to which images are brought, in pixels."
    )
    patch_size: Positive | None = Field(
        default=None, description="vit: height and width of a patch, in pixels."
    )
    classes: Positive | None = Field(
        default=None, description="vit: number of classes, as many as the data has."
    )
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScalingSpec | None = None
    tied_embeddings: bool = Field(
        default=False, description="Whether the head uses the embedding's weight."
    )
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="Compute dtype. Parameters are stored in float32."
    )
    compile: bool = False
    activation_checkpointing: ActivationCheckpointing = Field(
        default="none",
        description="What the backward pass computes again instead of keeping it in memory. full: "
        "all of a block; selective: all but matrix products and attention. The bits are the same.",
    )
    activation_checkpointing_every: Positive = Field(
        default=1, description="Of the blocks, each so manyth is checkpointed, from the first on."
    )

    @property
    def positions(self) -> int:
        """Length of the sequence that the blocks get: tokens of a text, or patches of an image."""
        if self.family == "llama":
            return self.sequence_length
        images = self.images
        return (images.image_size // images.patch_size) ** 2

    @property
    def images(self) -> ImageSizes:
        """The sizes of the family `vit`. Raises ValueError if one is not set."""
        if self.image_size is None or self.patch_size is None or self.classes is None:
            raise ValueError("the family vit needs image_size, patch_size and classes")
        return ImageSizes(self.image_size, self.patch_size, self.classes)


@dataclass(frozen=True)
class ImageSizes:
    """The sizes of square images and patches, in pixels, and the number of classes."""

    image_size: int
    patch_size: int
    classes: int

    @property
    def patch_values(self) -> int:
        """Numbers in a patch: three channels of each pixel."""
        return 3 * self.patch_size**2
