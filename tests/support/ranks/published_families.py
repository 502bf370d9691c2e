"""A tiny model of each published family, as transformers makes it, with random weights."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from holdfast_workers.models.llama import Llama
from holdfast_workers.models.llama_parameters import hugging_face_name, parameter_shapes
from holdfast_workers.published.model_config import read_config
from holdfast_workers.spec import ModelSpec

LENGTH = 24
"""Tokens of a sequence."""
SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 3.0}
_WINDOW = {"use_sliding_window": True, "sliding_window": 6}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"rope_parameters": _LLAMA3}),
    "llama, tied": ("llama", {"rope_parameters": _LINEAR, "tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": 5, "head_dim": 16, "rms_norm_eps": 1e-5}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2, with a window": ("qwen2", {**_WINDOW, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 16, "num_key_value_heads": 4}),
}
"""A family, and what its configuration says beside `SIZES`."""


@dataclass(frozen=True)
class Published:
    """A model of transformers, and the same as a spec and parameters of the built-in Llama."""

    theirs: Any
    spec: ModelSpec
    weights: dict[str, Tensor]


@cache
def published(name: str) -> Published:
    family, settings = CASES[name]
    of_config, _ = _classes(family)
    written: str = of_config(**{**SIZES, **settings}).to_json_string()
    return with_random_weights(json.loads(written))


def with_random_weights(document: dict[str, Any], length: int = LENGTH) -> Published:
    """The model of a `config.json`, of which no weight is without effect."""
    of_config, of_model = _classes(document["model_type"])
    config = of_config.from_dict(copy.deepcopy(document))  # which it changes
    theirs = of_model._from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                std = 0.5 if name.endswith((".bias", "embed_tokens.weight")) else 0.15
                parameter.normal_(0.0, std, generator=generator)
    fields = read_config(document).fields
    spec = ModelSpec.model_validate({**fields, "sequence_length": length})
    named = dict(theirs.named_parameters())
    assert spec.vocabulary is not None
    names = parameter_shapes(spec, spec.vocabulary)
    assert {hugging_face_name(name) for name in names} == set(named)
    weights = {name: named[hugging_face_name(name)].detach() for name in names}
    return Published(theirs, spec, weights)


def built(found: Published) -> Llama:
    """The built-in model with the same weights."""
    assert found.spec.vocabulary is not None
    model = Llama(found.spec, found.spec.vocabulary)
    model.reset_tables()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(found.weights[name])
    return model


def _classes(family: str) -> tuple[Any, Any]:
    """Those of its configuration and its model."""
    import transformers  # late: it takes seconds, and every run of tests collects this module

    name = family.capitalize()
    return getattr(transformers, f"{name}Config"), getattr(transformers, f"{name}ForCausalLM")
