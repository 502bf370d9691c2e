"""A Llama-style decoder as plain single-device code, independent of ranks and meshes.

Pre-norm blocks of causal grouped-query attention with rotary positions (Su et al. 2021,
arXiv:2104.09864) and a SwiGLU feed-forward (Shazeer 2020, arXiv:2002.05202); RMS norms; a head of
its own, or the embedding's weight (Press and Wolf 2017, arXiv:1608.05859). Flags of the spec make
it a Mistral (a window of attention), a Qwen2 (biases) or a Qwen3 (norms of queries and keys). Built
on the meta device, it allocates nothing until `to_empty`; `reset_tables` then fills the tables that
are computed rather than learned.

Parallelism is applied from outside: it replaces parameters, `forward` and `attend` of modules, and
`positions`.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast_workers.models.llama_parameters import default_ffn_dim
from holdfast_workers.models.transformer import (
    FeedForward,
    Norm,
    PreNormBlock,
    SelfAttention,
    Transformer,
)
from holdfast_workers.spec import ModelSpec, RopeScalingSpec


class RMSNorm(Norm):
    """Scales its input to a root mean square of 1."""

    def scaled(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x` with a root mean square of 1 along its last dimension, scaled by `weight` (Zhang and
    Sennrich 2019, arXiv:1910.07467).

    On an accelerator, and under torch.compile, it calls torch's own. On a CPU, torch's own consists
    of many small operations, each with its own backward pass over memory; here the gradient is
    written out, which takes a third of the time.
    """
    if x.device.type != "cpu" or x.dtype is not torch.float32 or torch.compiler.is_compiling():
        fused: Tensor = F.rms_norm(x, (x.shape[-1],), weight, eps)
        return fused
    normal: Tensor = _RMSNormOnCPU.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return normal


class _RMSNormOnCPU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = (norm.square_() / x.shape[-1]).add_(eps).rsqrt_()
        unit = x * scale
        ctx.save_for_backward(unit, scale, weight)
        scaled: Tensor = unit * weight
        return scaled

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        """d(unit)/dx = scale · (1 - unit · unitᵀ / dim)."""
        unit, scale, weight = ctx.saved_tensors
        weight_gradient = (gradient * unit).flatten(0, -2).sum(0)
        inner = gradient * weight
        along = torch.linalg.vecdot(inner, unit).unsqueeze(-1).div_(-unit.shape[-1])
        return inner.addcmul_(unit, along).mul_(scale), weight_gradient, None


class Llama(Transformer):
    """Maps token ids (batch, sequence) to logits (batch, sequence, vocabulary)."""

    embedding: nn.Embedding

    def __init__(self, spec: ModelSpec, vocabulary: int) -> None:
        super().__init__()
        self.sequence_length = spec.sequence_length
        self.head_size = spec.width
        self.rope_theta = spec.rope_theta
        self.rope_scaling = spec.rope_scaling
        self.embedding = nn.Embedding(vocabulary, spec.dim)
        self.blocks = nn.ModuleDict({str(at): Block(spec, at) for at in range(spec.layers)})
        self.norm = RMSNorm(spec.dim, spec.norm_eps)
        self.head = None if spec.tied_embeddings else nn.Linear(spec.dim, vocabulary, bias=False)
        self.set_positions(torch.arange(self.sequence_length, device="cpu"))

    def set_positions(self, positions: Tensor) -> None:
        """The tokens that the model gets are at these positions of their sequences. Makes new
        tables, which `reset_tables` fills."""
        self.positions = positions
        shape = (len(positions), self.head_size)
        for name in ("cos", "sin"):
            table = torch.empty(shape, device=self.embedding.weight.device)
            self.register_buffer(name, table, persistent=False)

    def reset_tables(self) -> None:
        """Fill the tables of rotary angles; computed on the CPU, so that all devices agree."""
        half = self.head_size // 2
        frequencies = self.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
        if self.rope_scaling is not None:
            frequencies = scaled_frequencies(frequencies, self.rope_scaling)
        angles = torch.outer(self.positions.double(), frequencies)
        self.get_buffer("cos").copy_(torch.cat((angles.cos(), angles.cos()), dim=-1))
        self.get_buffer("sin").copy_(torch.cat((-angles.sin(), angles.sin()), dim=-1))

    def tables(self, length: int | None = None) -> tuple[Tensor, Tensor]:
        """Cosines and sines (length, head_size) of the rotary angles of the first positions."""
        return self.get_buffer("cos")[:length], self.get_buffer("sin")[:length]

    def logits(self, x: Tensor) -> Tensor:
        """Logits of the normed output of the last block."""
        return F.linear(x, self.embedding.weight) if self.head is None else self.head(x)


class Block(PreNormBlock):
    attention: Attention

    def __init__(self, spec: ModelSpec, index: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(spec.dim, spec.norm_eps)
        self.attention = Attention(spec, spec.window_of(index))
        self.feed_forward_norm = RMSNorm(spec.dim, spec.norm_eps)
        self.feed_forward = SwiGLU(spec.dim, spec.ffn_dim or default_ffn_dim(spec.dim))
        self.dropout = spec.dropout


class Attention(SelfAttention):
    def __init__(self, spec: ModelSpec, window: int | None) -> None:
        super().__init__(spec)
        self.window = window
        norms = [RMSNorm(spec.width, spec.norm_eps) if spec.qk_norm else None for _ in range(2)]
        self.query_norm, self.key_norm = norms

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query, key, value = (self._heads(part(x)) for part in (self.query, self.key, self.value))
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        mixed = self.attend(rotate(query, cos, sin), rotate(key, cos, sin), value)
        return self.output(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Causal attention of (batch, heads, sequence, head_size); key and value may have fewer
        heads."""
        return causal_attention(query, key, value, self.window)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    """Attention of (batch, heads, sequence, head_size) to the last `window` positions, the own one
    included; None: to all before it. Key and value may have fewer heads."""
    key, value = repeated_heads(key, query), repeated_heads(value, query)
    if window is None:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)
    # A compiler makes it anew, where it is used, and warns of caches.
    made = window_mask.__wrapped__ if torch.compiler.is_compiling() else window_mask
    mask = made(query.shape[2], window, query.dtype, query.device)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


@lru_cache(maxsize=1)
def window_mask(length: int, window: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What a score gets added, (queries, keys): zero, or -inf where a query sees no key. One tensor
    for all blocks: each keeps its mask for the backward pass."""
    at = torch.arange(length, device=device)
    hidden = ~is_seen(at.unsqueeze(1), at, window)
    return torch.zeros((length, length), dtype=dtype, device=device).masked_fill(hidden, -math.inf)


def is_seen(query_at: Tensor, key_at: Tensor, window: int | None) -> Tensor:
    """Whether the query at one position attends to the key at the other."""
    seen = query_at >= key_at
    return seen if window is None else seen & (query_at - key_at < window)


class SwiGLU(FeedForward):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


def repeated_heads(x: Tensor, query: Tensor) -> Tensor:
    """Key or value heads (batch, heads, sequence, head_size), repeated to as many as `query` has:
    torch's CPU flash kernel does not support grouped heads."""
    repeats = query.shape[1] // x.shape[1]
    return x if repeats == 1 else x.repeat_interleave(repeats, dim=1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + head_size / 2) of (batch, heads, sequence, head_size) by position.

    `sin` is negative in its first half, so the swapped halves need no further sign.
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)


def scaled_frequencies(frequencies: Tensor, scaling: RopeScalingSpec) -> Tensor:
    """Rotary frequencies (radians per position) for longer sequences.

    `linear`: position interpolation (Chen et al. 2023, arXiv:2306.15595). `llama3`: as the models
    of Llama 3.1 define it. A frequency with fewer than `low_freq_factor` waves in the original
    length is interpolated, one with more than `high_freq_factor` waves is kept, and between the two
    the share of either is linear in the number of waves.
    """
    if scaling.type == "linear":
        return frequencies / scaling.factor
    waves = scaling.original_sequence_length * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((waves - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / scaling.factor)
