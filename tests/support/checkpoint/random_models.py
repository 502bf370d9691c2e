"""Sizes and values of small built-in language models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast_workers.models.llama_parameters import parameter_shapes
from holdfast_workers.spec import DataSpec, ModelSpec, TrainingSpec

Values = Mapping[str, NDArray[np.float32]]
SIZES: dict[str, Any] = {
    **{"dim": 32, "layers": 3, "heads": 4, "kv_heads": 2, "ffn_dim": 48, "sequence_length": 24},
    "vocabulary": 300,
}


def spec_of(model: ModelSpec, **data: Any) -> TrainingSpec:
    return TrainingSpec(model=model, data=DataSpec(**data))


def random_values(model: ModelSpec, seed: int = 1) -> Values:
    random = np.random.default_rng(seed)
    shapes = parameter_shapes(model, model.vocabulary or 256)
    return {
        name: ((name.endswith("norm.weight")) + 0.15 * random.standard_normal(shape)).astype(
            np.float32
        )
        for name, shape in shapes.items()
    }
