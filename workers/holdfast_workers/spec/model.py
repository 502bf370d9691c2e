"""The section `model`: a built-in model of a family, as it is without parallelism."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field

from holdfast_workers.spec.fields import NonNegative, Positive, Reference, Section

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


Family = Literal["llama", "vit", "transformers"]
WeightDtype = Literal["float32", "float16", "bfloat16"]
ComputeDtype = Literal["float32", "bfloat16"]


Folder = Annotated[
    Reference, AfterValidator(lambda path: str(PurePosixPath(path)) if path else path)
]
"""A path without needless slashes and dots, so that equal ones are equal texts."""


class PublishedSpec(Section):
    """The weights of a published model, as they were when the server read them."""

    uri: Reference = Field(
        description="URI of the folder with their manifest, which has a digest for each few "
        "megabytes, and with the model's small files."
    )
    digest: Annotated[str, Field(pattern="^[0-9a-f]{32}$")] = Field(
        description="Digest (XXH3, 128 bits) of the manifest."
    )
    manifest_bytes: Positive
    nbytes: Positive = Field(description="Of all files of weights.")
    dtype: WeightDtype | None = Field(
        default=None, description="Of all weights; null: they have several."
    )
    positions: Positive | None = Field(
        description="The longest sequence that the model was made for; null: its configuration "
        "names none."
    )
    config: dict[str, Any] | None = Field(
        default=None,
        description="Of the family transformers: the folder's config.json, which the model is "
        "built from.",
    )
    sizes: Annotated[str, Field(pattern="^[0-9a-f]{32}$")] | None = Field(
        default=None,
        description="Digest of the sizes of the model, which are those of the folder. null: ranks "
        "compare them with the folder's configuration, if they read its weights.",
    )


class ModelSpec(Section):
    model_config = ConfigDict(serialize_by_alias=True, validate_by_name=True)

    source: Folder | None = Field(
        default=None,
        alias="from",
        description="The folder of a published model in Hugging Face's format, which every node "
        "can read: for llama a Llama, Mistral, Qwen2 or Qwen3. The sizes of the model are those of "
        "its config.json, and the first weights those of its safetensors. null: random weights, "
        "but for transformers, which needs a folder.",
    )
    published: PublishedSpec | None = Field(
        default=None,
        description="The weights of `from`. The server sets it before the job takes nodes.",
    )
    family: Family = Field(
        default="llama",
        description="llama: a language model, of bytes of text. vit: a Vision Transformer, which "
        "classifies images. transformers: the language model of `from`, as the library "
        "transformers computes it, on the data-parallel axes.",
    )
    dim: Positive = 128
    layers: Annotated[int, Field(ge=1, le=10_000)] = 4
    heads: Positive = 4
    kv_heads: Positive | None = Field(
        default=None, description="Number of key and value heads. null: the same as `heads`."
    )
    head_size: Positive | None = Field(
        default=None, description="llama: width of a head. null: `dim` / `heads`."
    )
    qkv_bias: bool = Field(
        default=False,
        description="llama: whether the projections to queries, keys and values have biases, as in "
        "Qwen2.",
    )
    qk_norm: bool = Field(
        default=False,
        description="llama: whether each head's query and key are normed before their rotation, as "
        "in Qwen3.",
    )
    sliding_window: Positive | None = Field(
        default=None,
        description="llama: number of positions that a token attends to, itself included, as in "
        "Mistral. null: all before it.",
    )
    window_from: NonNegative = Field(
        default=0, description="llama: the first block whose attention has the `sliding_window`."
    )
    vocabulary: Positive | None = Field(
        default=None,
        description="llama: number of tokens that the model knows, at least the tokenizer's. "
        "null: the tokenizer's.",
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
    dtype: ComputeDtype = Field(
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
    def has_sizes(self) -> bool:
        """Whether the sizes are known: those of a published model are once it has been read."""
        return self.source is None or self.published is not None

    @property
    def sizes_digest(self) -> str:
        """Digest (SHA-256, its first 128 bits) of all that a published configuration determines."""
        sizes = self.model_dump(mode="json", include={*OF_PUBLISHED})
        if self.published is not None and self.published.config is not None:
            sizes["config"] = self.published.config
        return hashlib.sha256(json.dumps(sizes, sort_keys=True).encode()).hexdigest()[:32]

    @property
    def width(self) -> int:
        """Width of a head of attention."""
        return self.head_size or self.dim // self.heads

    def window_of(self, block: int) -> int | None:
        """Number of positions that a token of a sequence attends to in a block, at most; None: all
        before it, and itself."""
        window = self.sliding_window
        is_less = window is not None and window < self.sequence_length
        return window if is_less and block >= self.window_from else None

    @property
    def positions(self) -> int:
        """Length of the sequence that the blocks get: tokens of a text, or patches of an image."""
        if self.family != "vit":
            return self.sequence_length
        images = self.images
        return (images.image_size // images.patch_size) ** 2

    @property
    def images(self) -> ImageSizes:
        """The sizes of the family `vit`. Raises ValueError if one is not set."""
        if self.image_size is None or self.patch_size is None or self.classes is None:
            raise ValueError("the family vit needs image_size, patch_size and classes")
        return ImageSizes(self.image_size, self.patch_size, self.classes)


OF_PUBLISHED = (
    *("dim", "layers", "heads", "kv_heads", "head_size", "qkv_bias", "qk_norm", "sliding_window"),
    *("window_from", "vocabulary", "ffn_dim", "norm_eps", "rope_theta", "rope_scaling"),
    "tied_embeddings",
)
"""The fields that the configuration of a published model determines."""


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
