"""Llama as Hugging Face defines it, reimplemented from its definition: names and arithmetic.

`LlamaForCausalLM` has pre-norm blocks; RMS norm; rotary positions applied as
`x * cos + rotate_half(x) * sin` with cos and sin of the angles repeated; key and value heads
repeated for their group of query heads; softmax in float32; SwiGLU; a head of its own or tied.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def forward(weights: dict[str, Tensor], config: dict[str, Any], tokens: Tensor) -> Tensor:
    """Logits (batch, sequence, vocabulary) of token ids (batch, sequence)."""
    x = weights["model.embed_tokens.weight"][tokens]
    cos, sin = _tables(config, tokens.shape[1])
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        part = {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}
        normed = _norm(x, part["input_layernorm.weight"], config)
        x = x + _attention(part, config, normed, cos, sin)
        normed = _norm(x, part["post_attention_layernorm.weight"], config)
        gate = normed @ part["mlp.gate_proj.weight"].T
        up = normed @ part["mlp.up_proj.weight"].T
        x = x + (gate * torch.sigmoid(gate) * up) @ part["mlp.down_proj.weight"].T
    head = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    return _norm(x, weights["model.norm.weight"], config) @ weights[head].T


def _norm(x: Tensor, weight: Tensor, config: dict[str, Any]) -> Tensor:
    mean_square = x.pow(2).mean(-1, keepdim=True)
    return weight * (x * torch.rsqrt(mean_square + config["rms_norm_eps"]))


def _tables(config: dict[str, Any], length: int) -> tuple[Tensor, Tensor]:
    head_dim = config["head_dim"]
    inverse = 1.0 / config["rope_theta"] ** (torch.arange(0, head_dim, 2).float() / head_dim)
    if config["rope_scaling"] is not None:
        inverse = torch.tensor([_scaled(float(f), config["rope_scaling"]) for f in inverse])
    angles = torch.arange(length).float()[:, None] * inverse[None, :]
    both = torch.cat((angles, angles), dim=-1)
    return both.cos(), both.sin()


def _scaled(frequency: float, scaling: dict[str, Any]) -> float:
    slow = frequency / float(scaling["factor"])
    if scaling["rope_type"] == "linear":
        return slow
    original = scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelength = 2 * math.pi / frequency
    if wavelength < original / high:
        return frequency
    if wavelength > original / low:
        return slow
    smooth = float((original / wavelength - low) / (high - low))
    return (1 - smooth) * slow + smooth * frequency


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _attention(
    part: dict[str, Tensor], config: dict[str, Any], x: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    batch, length, _ = x.shape
    head_dim, heads = config["head_dim"], config["num_attention_heads"]

    def split(name: str) -> Tensor:
        projected = x @ part[f"self_attn.{name}_proj.weight"].T
        return projected.view(batch, length, -1, head_dim).transpose(1, 2)

    query, key, value = split("q"), split("k"), split("v")
    query, key = _rotated(query, cos, sin), _rotated(key, cos, sin)
    groups = heads // config["num_key_value_heads"]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    scores = query @ key.transpose(2, 3) / math.sqrt(head_dim)
    scores = scores + torch.full((length, length), -math.inf).triu(1)
    mixed = torch.softmax(scores, dim=-1) @ value
    return mixed.transpose(1, 2).reshape(batch, length, -1) @ part["self_attn.o_proj.weight"].T
