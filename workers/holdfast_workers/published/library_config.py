"""What the library `transformers` says of a published `config.json`: the tensors of its model, and
whether it can be trained here, which is tried. Imports torch, and loads the library."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from holdfast_workers.models.library_model import LibraryModel, UnfitModel, new_library_model
from holdfast_workers.models.library_trial import try_model
from holdfast_workers.models.llama_parameters import Shape
from holdfast_workers.published.model_config import (
    PublishedConfig,
    UnfitConfig,
    check_without_effect,
)
from holdfast_workers.published.shown_values import shown
from holdfast_workers.published.weight_files import BUFFER, WantedTensors
from holdfast_workers.spec.model import ComputeDtype

_LARGEST_CONFIG = 64 << 10
"""Bytes of a configuration, which is a part of the job's spec."""
_WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "auto_map": (None,),
    "quantization_config": (None,),
    "is_encoder_decoder": (None, False),
    "output_router_logits": (None, False),
}
"""The values of keys with which a model is trained as its other keys say."""


def read_library_config(
    document: object, dtype: ComputeDtype
) -> tuple[PublishedConfig, WantedTensors]:
    """Raises UnfitConfig."""
    if not isinstance(document, Mapping):
        raise UnfitConfig("it is not an object of JSON")
    try:
        nbytes = len(json.dumps(document, allow_nan=False))
    except ValueError as error:
        raise UnfitConfig("it has a number that is too large for a float") from error
    if nbytes > _LARGEST_CONFIG:
        raise UnfitConfig(f"it is larger than {_LARGEST_CONFIG} bytes")
    for key, values in _WITHOUT_EFFECT.items():
        check_without_effect(document, key, values)
    try:
        model = new_library_model(document)
        kind = type(model).__name__
        if document.get("architectures") not in (None, [kind]):
            raise UnfitConfig(
                f"architectures is {shown(document['architectures'])}: only a {kind} predicts the "
                "next token"
            )
        weights = {**dict(model.named_parameters()), **model.constants()}
        shapes = {name: tuple(each.shape) for name, each in weights.items()}
        wanted = WantedTensors(shapes, _aliases(model, shapes), _ignored_by(model))
        positions = _positions(model)
        tokens = try_model(model, getattr(torch, dtype), positions)
    except UnfitModel as error:
        raise UnfitConfig(str(error)) from error
    config = PublishedConfig(str(document["model_type"]), {"vocabulary": tokens}, positions)
    return config, wanted


def _positions(model: Any) -> int | None:
    """The longest sequence that the model was made for; None: the configuration names none."""
    found = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def _aliases(model: LibraryModel, shapes: Mapping[str, Shape]) -> dict[str, str]:
    """Other names of parameters, each with the one in `shapes`: those of shared ones, and all
    without the prefix that a model without a head does not have."""
    path = {module: name for name, module in model.named_modules()}
    found: dict[str, str] = {}
    for places in model.ties:
        names = [f"{path[module]}.{name}".lstrip(".") for module, name in places]
        (own,) = shapes.keys() & set(names)
        found |= dict.fromkeys(set(names) - {own}, own)
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    for name, own in [*((name, name) for name in shapes), *found.items()]:
        short = name.removeprefix(prefix)
        if short != name and short not in shapes:
            found.setdefault(short, own)
    return found


def _ignored_by(model: LibraryModel) -> Callable[[str], bool]:
    """The tables of a model, and what its class says to ignore."""
    tables = {name for name, _ in model.named_buffers()}
    patterns = [*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())]

    def is_ignored(name: str) -> bool:
        is_table = name in tables or name.endswith(BUFFER)
        return is_table or any(re.search(pattern, name) for pattern in patterns)

    return is_ignored
