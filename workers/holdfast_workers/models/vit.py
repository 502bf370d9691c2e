"""A Vision Transformer (Dosovitskiy et al. 2021, arXiv:2010.11929) as plain single-device code.

Patches of an image, flattened and projected, with learned positions; pre-norm blocks in which each
patch attends to all; the mean over the patches, and a linear head. As in ViT-22B (Dehghani et al.
2023, arXiv:2302.05442, section 2) no layer has a bias.

Parallelism is applied from outside: it replaces parameters, and `forward` and `attend` of modules.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast_workers.models.transformer import (
    FeedForward,
    Norm,
    PreNormBlock,
    SelfAttention,
    Transformer,
)
from holdfast_workers.models.vit_parameters import hidden_size
from holdfast_workers.spec import ModelSpec


class VisionTransformer(Transformer):
    """Maps images (batch, height, width, 3) of bytes to logits (batch, classes)."""

    embedding: PatchEmbedding

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.embedding = PatchEmbedding(spec)
        self.blocks = nn.ModuleDict({str(index): VisionBlock(spec) for index in range(spec.layers)})
        self.norm = LayerNorm(spec.dim, spec.norm_eps)
        self.head = nn.Linear(spec.dim, spec.images.classes, bias=False)

    def logits(self, x: Tensor) -> Tensor:
        return self.head(x.mean(1))  # type: ignore[no-any-return]


class PatchEmbedding(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.patch_size = spec.images.patch_size
        self.weight = nn.Parameter(torch.empty(spec.dim, spec.images.patch_values))
        self.positions = nn.Parameter(torch.empty(spec.positions, spec.dim))

    def forward(self, images: Tensor) -> Tensor:
        values = patches(images, self.patch_size).float() / 127.5 - 1.0
        return F.linear(values.to(self.weight.dtype), self.weight) + self.positions


class VisionBlock(PreNormBlock):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.attention_norm = LayerNorm(spec.dim, spec.norm_eps)
        self.attention = VisionAttention(spec)
        self.feed_forward_norm = LayerNorm(spec.dim, spec.norm_eps)
        self.feed_forward = MLP(spec.dim, hidden_size(spec))
        self.dropout = spec.dropout


class LayerNorm(Norm):
    """Brings its input to a mean of 0 and a variance of 1."""

    def scaled(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.layer_norm(x, (x.shape[-1],), weight, None, self.eps)


class VisionAttention(SelfAttention):
    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (self._heads(part(x)) for part in (self.query, self.key, self.value))
        mixed = self.attend(query, key, value)
        return self.output(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of each position to all, of (batch, heads, sequence, head_size)."""
        return F.scaled_dot_product_attention(query, key, value)


class MLP(FeedForward):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))  # type: ignore[no-any-return]


def patches(images: Tensor, size: int) -> Tensor:
    """Images (batch, height, width, 3) as (batch, patches, size * size * 3): row by row, and each
    patch row by row with the channels of a pixel together."""
    batch, height, width, channels = images.shape
    cut = images.view(batch, height // size, size, width // size, size, channels)
    return cut.transpose(2, 3).reshape(batch, -1, size * size * channels)
