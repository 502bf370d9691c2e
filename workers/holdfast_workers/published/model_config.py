"""What a published `config.json` says of a model, as fields of the section `model`. Pure, no torch.

Only what the built-in Llama computes in the same way is taken: each key that would change a result
is read, or its value must be the one that has no effect. A key is never guessed where it is missing
and families differ. The rate of dropout is no part of a model: the section `model` has one. Code
that a folder brings is never run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, TypeVar

from holdfast_workers.errors import WorkersError
from holdfast_workers.published.shown_values import shown, shown_name

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""The `model_type` of each family whose blocks the built-in Llama has."""
_MISTRAL_WINDOW = 4096
"""Of a configuration without the key."""
_DEFAULT_THETA = 10_000.0
"""Of a configuration without the key, in every family."""
_SLIDING, _FULL = "sliding_attention", "full_attention"
_WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "mlp_bias": (None, False),
    "partial_rotary_factor": (None, 1, 1.0),
    "is_causal": (True,),
    "per_layer_config": (None,),
    "quantization_config": (None,),
    "transformers_weights": (None,),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
    "auto_map": (None,),
}
"""The values of keys with which a model is the one that its other keys describe."""
_OF_ROTATION: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        *("factor", "low_freq_factor", "high_freq_factor"),
        "original_max_position_embeddings",
    ),
}
"""What each kind of rotary positions has, beside what all have."""
_OF_EVERY_ROTATION = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
_WHY = {
    "quantization_config": "its weights are quantized: use the folder of the model that is not",
    "auto_map": "it names code of its own, which is never run",
    "output_router_logits": "output_router_logits adds the routers' loss, which is not trained "
    "with here: set it to false",
    "is_encoder_decoder": "it has an encoder, too: only models that read a text are trained here",
}

_MOST = 2**53 - 1
"""Every whole number, at most: a float is exact up to there."""
_MOST_LAYERS = 10_000
"""As in the section `model`."""

Value = TypeVar("Value")


class UnfitConfig(WorkersError):
    """The configuration is damaged, or of a model that is not among the families."""


@dataclass(frozen=True)
class PublishedConfig:
    """The configuration of a published model."""

    family: str
    """Its `model_type`."""
    fields: Mapping[str, Any]
    """Of the section `model`, as in JSON: all that a configuration determines."""
    positions: int | None
    """The longest sequence that the model was made for; None: it names none."""


def read_config(document: object) -> PublishedConfig:
    """Raises UnfitConfig, with the key at fault."""
    if not isinstance(document, Mapping):
        raise UnfitConfig("it is not an object of JSON")
    family = document.get("model_type")
    if family not in FAMILIES:
        known = f"{', '.join(FAMILIES[:-1])} and {FAMILIES[-1]}"
        raise UnfitConfig(
            f"model_type is {shown(family)}: the family llama is for {known}, and transformers for "
            "others"
        )
    _check_head(family, document.get("architectures"))
    for key, values in _WITHOUT_EFFECT.items():
        check_without_effect(document, key, values)
    read = _ConfigReader(document)
    layers = read.number("num_hidden_layers", _MOST_LAYERS)
    window, window_from = _window(family, read, layers)
    fields: dict[str, Any] = {
        "dim": read.number("hidden_size"),
        "layers": layers,
        "heads": read.number("num_attention_heads"),
        "kv_heads": _kv_heads(family, read),
        "head_size": _head_size(family, read),
        "ffn_dim": read.number("intermediate_size"),
        "vocabulary": read.number("vocab_size"),
        "norm_eps": read.positive("rms_norm_eps"),
        "qkv_bias": _has_bias(family, read),
        "qk_norm": family == "qwen3",
        "sliding_window": window,
        "window_from": window_from,
        "tied_embeddings": read.flag("tie_word_embeddings"),
        **_rotation(read),
    }
    return PublishedConfig(family, fields, read.number("max_position_embeddings"))


def _check_head(family: str, architectures: object) -> None:
    name = f"{family.capitalize()}ForCausalLM"
    if architectures is not None and architectures != [name]:
        raise UnfitConfig(
            f"architectures is {shown(architectures)}: only a {name} predicts the next token"
        )


def check_without_effect(document: Mapping[str, Any], key: str, values: tuple[Any, ...]) -> None:
    """Raises UnfitConfig if the key has another value than these; the first is that of one without
    the key."""
    value = document.get(key, values[0])
    if not any(value == each and type(value) is type(each) for each in values):
        raise UnfitConfig(
            _WHY.get(key, f"{key} is {shown(value)}, which the built-in model does not have")
        )


def _kv_heads(family: str, read: _ConfigReader) -> int | None:
    if family == "llama":
        return read.number_or("num_key_value_heads", None)
    return read.number("num_key_value_heads")  # defaults differ


def _head_size(family: str, read: _ConfigReader) -> int | None:
    # A Qwen2 needs none, but if it is there, it must be a number; a Qwen3 has another default.
    if family == "qwen3" or (family == "qwen2" and "head_dim" in read.document):
        return read.number("head_dim")
    return read.number_or("head_dim", None)


def _has_bias(family: str, read: _ConfigReader) -> bool:
    if family == "qwen2":
        return True
    if read.flag("attention_bias"):
        raise UnfitConfig(
            "attention_bias is true, for all four projections of attention: the built-in model has "
            "biases for queries, keys and values alone"
        )
    return False


def _window(family: str, read: _ConfigReader, layers: int) -> tuple[int | None, int]:
    """The number of positions, and the first block whose attention has that limit."""
    window, window_from = None, 0
    if family == "mistral":
        default = _MISTRAL_WINDOW if "sliding_window" not in read.document else None
        window = read.number_or("sliding_window", default)
    elif family != "llama":
        is_used = read.flag("use_sliding_window")
        if is_used and "sliding_window" not in read.document:
            raise UnfitConfig("sliding_window is missing, and use_sliding_window is true")
        window = read.number_or("sliding_window", None) if is_used else None
        window_from = read.count("max_window_layers") if window is not None else 0
    window_from = min(window_from, layers)
    types = read.document.get("layer_types")
    if types is not None:
        rest = _SLIDING if window is not None else _FULL
        if types != [_FULL] * window_from + [rest] * (layers - window_from):
            raise UnfitConfig(
                "layer_types is not what its other keys say: only models whose last layers have "
                "the sliding window are supported"
            )
    return window, window_from


def _rotation(read: _ConfigReader) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`, as configurations before and since version 5 of the library
    have them."""
    older, newer = (read.document.get(key) for key in ("rope_scaling", "rope_parameters"))
    if older and newer and older != newer:
        raise UnfitConfig("rope_scaling and rope_parameters differ: remove one of them")
    found = older or newer or {}
    if not isinstance(found, Mapping):
        raise UnfitConfig("rope_scaling is not an object of JSON")
    kind = found.get("rope_type", found.get("type", "default"))
    if not isinstance(kind, str) or kind not in _OF_ROTATION:
        raise UnfitConfig(
            f"its rope_type is {shown(kind)}: the built-in model has linear and llama3"
        )
    own = _OF_ROTATION[kind]
    if unknown := sorted(set(found) - {*own, *_OF_EVERY_ROTATION}):
        raise UnfitConfig(
            f"its rope_type {kind!r} has {shown_name(unknown[0])}, which the built-in model does "
            "not have"
        )
    check_without_effect(found, "partial_rotary_factor", (None, 1, 1.0))
    rope = _ConfigReader(found)
    theta = (rope if "rope_theta" in found else read).positive_or("rope_theta", _DEFAULT_THETA)
    if kind == "default":
        return {"rope_theta": theta, "rope_scaling": None}
    factor = rope.positive("factor")
    if factor < 1:
        raise UnfitConfig(f"factor is {factor:g}: rotary positions are scaled by 1 or more")
    scaling: dict[str, Any] = {"type": kind, "factor": factor}
    if kind == "llama3":
        scaling |= {
            "low_freq_factor": rope.positive("low_freq_factor"),
            "high_freq_factor": rope.positive("high_freq_factor"),
            "original_sequence_length": rope.number("original_max_position_embeddings"),
        }
        # At the top, where configurations of some other families have it, it would prevail.
        length = scaling["original_sequence_length"]
        check_without_effect(read.document, "original_max_position_embeddings", (length,))
    return {"rope_theta": theta, "rope_scaling": scaling}


class _ConfigReader:
    """Values of a document by their types. Each raises UnfitConfig."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.document = document

    def number(self, key: str, most: int = _MOST) -> int:
        return self._whole(key, 1, most)

    def count(self, key: str) -> int:
        return self._whole(key, 0, _MOST)

    def number_or(self, key: str, default: int | None) -> int | None:
        return default if self.document.get(key) is None else self.number(key)

    def positive(self, key: str) -> float:
        if type(self.document.get(key)) is int:
            return float(self.number(key))
        return self._value(key, float, lambda x: x > 0 and isfinite(x), "a positive number")

    def positive_or(self, key: str, default: float) -> float:
        return self.positive(key) if key in self.document else default

    def flag(self, key: str) -> bool:
        if key not in self.document:
            return False
        return self._value(key, bool, lambda _: True, "true or false")

    def _whole(self, key: str, least: int, most: int) -> int:
        what = f"a whole number from {least} to {most}"
        return self._value(key, int, lambda value: least <= value <= most, what)

    def _value(
        self, key: str, kind: type[Value], is_legal: Callable[[Value], bool], what: str
    ) -> Value:
        found = self.document.get(key)
        if type(found) is not kind or not is_legal(found):
            value = "null" if found is None else shown(found)
            fault = f"is {value}, and not {what}" if key in self.document else "is missing"
            raise UnfitConfig(f"{key} {fault}")
        return found
