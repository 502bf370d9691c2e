"""What the models of all families have in common, as plain single-device code.

`parallelize` works on these classes: a model embeds its inputs as a sequence, passes it through
pre-norm blocks, and makes logits of the normed output of the last. Attention derives its number of
heads from the width of its projections, so the same code runs on a tensor-parallel shard of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
import xxhash
from torch import Tensor, nn

from holdfast_workers.spec import ModelSpec


class BlockModel(nn.Module):
    """Built on the meta device, it allocates nothing until `to_empty`; `reset_tables` then fills
    the tables that are computed rather than learned."""

    blocks: nn.ModuleDict | Mapping[str, nn.Module]
    """The parts of it that are gathered, and checkpointed, one at a time; by name."""

    def reset_tables(self) -> None:
        """Compute the model's tables anew. By default a model has none."""

    def constants(self) -> dict[str, Tensor]:
        """What is saved with the parameters, though no step changes it, by name. By default
        nothing."""
        return {}


class Transformer(BlockModel):
    """A model of blocks that follow each other, of which each rank may have some."""

    FIRST = ("embedding",)
    """The model's modules before the blocks."""
    LAST = ("norm", "head")
    """The model's modules after the blocks."""

    embedding: nn.Module
    """Maps the inputs to the residual stream (batch, sequence, dim)."""
    blocks: nn.ModuleDict
    """The blocks, each a `PreNormBlock`, by index."""
    norm: Norm

    def forward(self, inputs: Tensor) -> Tensor:
        x, tables = self.enter(inputs), self.tables(inputs.shape[1])
        for block in self.blocks.values():
            x = block(x, *tables)
        return self.leave(x)

    def enter(self, inputs: Tensor) -> Tensor:
        """The input of the first block, (batch, sequence, dim)."""
        return self.embedding(inputs)  # type: ignore[no-any-return]

    def leave(self, x: Tensor) -> Tensor:
        """The logits of the last block's output."""
        return self.logits(self.norm(x))

    def tables(self, length: int | None = None) -> tuple[Tensor, ...]:
        """The tables that each block gets, cut to `length` positions of a text."""
        del length
        return ()

    def logits(self, x: Tensor) -> Tensor:
        """Logits of the normed output of the last block."""
        raise NotImplementedError


class PreNormBlock(nn.Module):
    attention_norm: Norm
    attention: SelfAttention
    feed_forward_norm: Norm
    feed_forward: FeedForward
    dropout: float

    def forward(self, x: Tensor, *tables: Tensor) -> Tensor:
        x = x + self._drop(self.attention(self.attention_norm(x), *tables))
        return x + self._drop(self.feed_forward(self.feed_forward_norm(x)))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class Norm(nn.Module):
    """Normalises the last dimension, and scales it by `weight`."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(x, self.weight)

    def scaled(self, x: Tensor, weight: Tensor) -> Tensor:
        """The normed `x`, scaled by `weight` in place of the norm's own."""
        raise NotImplementedError


class SelfAttention(nn.Module):
    """The projections of attention. A family adds `forward`, with `attend` as its middle."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.head_size = spec.width
        width, kv_width = spec.heads * spec.width, (spec.kv_heads or spec.heads) * spec.width
        self.query = nn.Linear(spec.dim, width, bias=spec.qkv_bias)
        self.key = nn.Linear(spec.dim, kv_width, bias=spec.qkv_bias)
        self.value = nn.Linear(spec.dim, kv_width, bias=spec.qkv_bias)
        self.output = nn.Linear(width, spec.dim, bias=False)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of (batch, heads, sequence, head_size); key and value may have fewer heads."""
        raise NotImplementedError

    def _heads(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = width // self.head_size
        return x.view(batch, length, heads, self.head_size).transpose(1, 2)


class FeedForward(nn.Module):
    """Layers from `dim` to a hidden size, and `down` back; each is linear without a bias."""

    down: nn.Linear


def initial_values(name: str, shape: tuple[int, ...], layers: int, seed: int) -> Tensor:
    """The whole parameter `name` at step 0: a function of (seed, name) only, computed on the CPU.

    Norms are one, and biases zero; matrices are normal with standard deviation 0.02, those that
    write into the residual stream scaled by 1/sqrt(2 · layers) (GPT-2, Radford et al. 2019,
    section 2.3).
    """
    if name.endswith(".bias"):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.ones(shape)
    std = 0.02
    if name.endswith(("attention.output.weight", "feed_forward.down.weight")):
        std /= math.sqrt(2 * layers)
    generator = torch.Generator().manual_seed(_parameter_seed(seed, name))
    return torch.empty(shape).normal_(0.0, std, generator=generator)


def _parameter_seed(seed: int, name: str) -> int:
    return int(xxhash.xxh3_64_intdigest(f"{seed}/{name}".encode()))
