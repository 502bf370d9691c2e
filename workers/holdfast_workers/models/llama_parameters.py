"""The Llama's parameters by name: their shapes, and their names in Hugging Face. Pure, no torch.

The rotary layout is the same on both sides: pairs (i, i + head_size / 2) are rotated, with the
same frequencies, so no row of a projection has to be permuted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from typing import Any

from holdfast_workers.errors import WorkersError
from holdfast_workers.spec import ModelSpec, RopeScalingSpec, SpecialRole

Shape = tuple[int, ...]

_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)")
_TOP = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_IN_BLOCK = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.query.weight": "self_attn.q_proj.weight",
    "attention.key.weight": "self_attn.k_proj.weight",
    "attention.value.weight": "self_attn.v_proj.weight",
    "attention.output.weight": "self_attn.o_proj.weight",
    "attention.query.bias": "self_attn.q_proj.bias",
    "attention.key.bias": "self_attn.k_proj.bias",
    "attention.value.bias": "self_attn.v_proj.bias",
    "attention.query_norm.weight": "self_attn.q_norm.weight",
    "attention.key_norm.weight": "self_attn.k_norm.weight",
    "feed_forward_norm.weight": "post_attention_layernorm.weight",
    "feed_forward.gate.weight": "mlp.gate_proj.weight",
    "feed_forward.up.weight": "mlp.up_proj.weight",
    "feed_forward.down.weight": "mlp.down_proj.weight",
}


def default_ffn_dim(dim: int) -> int:
    """8/3 of `dim`, rounded up to a multiple of 64."""
    return -(-8 * dim // (3 * 64)) * 64


def parameter_shapes(model: ModelSpec, vocabulary: int) -> dict[str, Shape]:
    """The whole shape of every parameter, by name."""
    dim, hidden = model.dim, model.ffn_dim or default_ffn_dim(model.dim)
    width, kv_width = model.heads * model.width, (model.kv_heads or model.heads) * model.width
    in_block: dict[str, Shape] = {
        "attention_norm.weight": (dim,),
        "attention.query.weight": (width, dim),
        "attention.key.weight": (kv_width, dim),
        "attention.value.weight": (kv_width, dim),
        "attention.output.weight": (dim, width),
        "feed_forward_norm.weight": (dim,),
        "feed_forward.gate.weight": (hidden, dim),
        "feed_forward.up.weight": (hidden, dim),
        "feed_forward.down.weight": (dim, hidden),
    }
    if model.qkv_bias:
        in_block |= {
            "attention.query.bias": (width,),
            "attention.key.bias": (kv_width,),
            "attention.value.bias": (kv_width,),
        }
    if model.qk_norm:
        in_block |= {
            "attention.query_norm.weight": (model.width,),
            "attention.key_norm.weight": (model.width,),
        }
    blocks = {
        f"blocks.{index}.{name}": shape
        for index in range(model.layers)
        for name, shape in in_block.items()
    }
    top: dict[str, Shape] = {
        "embedding.weight": (vocabulary, dim),
        "norm.weight": (dim,),
    }
    if not model.tied_embeddings:
        top["head.weight"] = (vocabulary, dim)
    return {**top, **blocks}


def head_in_blocks(model: ModelSpec, vocabulary: int) -> float:
    """The multiplications of the head for a token, as a fraction of those of a block. The
    embedding multiplies nothing."""
    shapes = parameter_shapes(model.model_copy(update={"layers": 1}), vocabulary)
    block = sum(prod(shape) for name, shape in shapes.items() if name.startswith("blocks."))
    # Scores and mixing, of half of the positions.
    attention = model.heads * model.width * model.sequence_length
    return model.dim * vocabulary / (block + attention)


def hugging_face_name(name: str) -> str:
    """The parameter's name in `LlamaForCausalLM`. Raises KeyError for an unknown parameter."""
    block = _BLOCK.fullmatch(name)
    if block is None:
        return _TOP[name]
    return f"model.layers.{block[1]}.{_IN_BLOCK[block[2]]}"


class NoArchitecture(WorkersError):
    """No architecture of Hugging Face has this combination of flags."""


def hugging_face_config(
    model: ModelSpec, vocabulary: int, special_ids: Mapping[SpecialRole, int]
) -> dict[str, Any]:
    """The content of the model's `config.json`, of the architecture that has its flags, in the form
    that versions 4 and 5 of `transformers` read. `special_ids`: of the tokenizer. Raises
    NoArchitecture."""
    return {
        **_architecture(model),
        **hugging_face_ids(special_ids),
        "vocab_size": vocabulary,
        "hidden_size": model.dim,
        "intermediate_size": model.ffn_dim or default_ffn_dim(model.dim),
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads or model.heads,
        "head_dim": model.width,
        "hidden_act": "silu",
        "max_position_embeddings": model.sequence_length,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "rope_scaling": _hugging_face_rope_scaling(model.rope_scaling),
        "tie_word_embeddings": model.tied_embeddings,
        "torch_dtype": "float32",
    }


def hugging_face_ids(special_ids: Mapping[SpecialRole, int]) -> dict[str, int | None]:
    """The entries of the ids that generation needs. The model has seen the end of documents, which
    is the end for generation too."""
    return {
        "bos_token_id": special_ids.get("bos"),
        "eos_token_id": special_ids.get("document_end"),
        "pad_token_id": special_ids.get("pad"),
    }


def _architecture(model: ModelSpec) -> dict[str, Any]:
    """The entries that only some architectures have."""
    window = model.sliding_window
    if model.qkv_bias and model.qk_norm:
        raise NoArchitecture(
            "no architecture of Hugging Face has both model.qkv_bias, as Qwen2, and "
            "model.qk_norm, as Qwen3"
        )
    if model.qkv_bias or model.qk_norm:
        name = "Qwen2" if model.qkv_bias else "Qwen3"
        return {
            "architectures": [f"{name}ForCausalLM"],
            "model_type": name.lower(),
            "use_sliding_window": window is not None,
            "sliding_window": window,
            "max_window_layers": model.layers if window is None else model.window_from,
            **({} if model.qkv_bias else {"attention_bias": False}),
        }
    if window is not None:
        if model.window_from:
            raise NoArchitecture(
                "no architecture of Hugging Face has model.sliding_window from the block "
                f"model.window_from = {model.window_from} on without model.qkv_bias or "
                "model.qk_norm"
            )
        return {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "sliding_window": window,
        }
    if model.dim % model.heads:
        raise NoArchitecture(
            f"Hugging Face's Llama needs a model.dim that is a multiple of model.heads, not "
            f"{model.dim} with {model.heads}"
        )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
    }


def _hugging_face_rope_scaling(scaling: RopeScalingSpec | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    if scaling.type == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_sequence_length,
    }
