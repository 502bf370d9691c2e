"""Writes the folder of a tiny published model, with random weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from holdfast_workers.published.folder import model_of, published_shapes
from holdfast_workers.published.model_config import read_config
from holdfast_workers.published.weight_files import INDEX, SINGLE

CONFIG: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 320,
    "rms_norm_eps": 1e-6,
    "rope_theta": 50_000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}


def write_folder(folder: Path, files: int = 1, **changes: Any) -> Path:
    """`files`: among which its tensors are divided; `changes`: of `CONFIG`."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**CONFIG, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    random = np.random.default_rng(7)
    tensors = {
        name: random.standard_normal(shape, np.float32)
        for name, shape in published_shapes(model_of(read_config(config))).items()
    }
    if files == 1:
        save_file(tensors, folder / SINGLE)
        return folder
    file_of = {
        name: f"model-{at % files + 1:05}-of-{files:05}.safetensors"
        for at, name in enumerate(tensors)
    }
    for file in set(file_of.values()):
        of_file = {name: each for name, each in tensors.items() if file_of[name] == file}
        save_file(of_file, folder / file)
    write_index(folder, file_of)
    return folder


def write_index(folder: Path, file_of: Mapping[str, str]) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict(file_of)}))
