"""Published weights are loaded in the memory of a rank's share, whatever the whole model needs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.checkpoint.published_models import prepared_model
from tests.support.ranks import published_programs as programs
from tests.support.ranks.corpora import small_corpus
from tests.support.ranks.rank_worlds import Worlds, tiny_spec

from holdfast_workers.published.folder import published_shapes
from holdfast_workers.published.model_config import read_config
from holdfast_workers.published.weight_set import CHUNK_BYTES
from holdfast_workers.spec import ModelSpec

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 1024,
    "num_hidden_layers": 7,
    "num_attention_heads": 16,
    "intermediate_size": 2816,
    "vocab_size": 8000,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
}
MODEL_BYTES, MARGIN_BYTES = 400 << 20, 100 * 10**6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelSpec]:
    folder = tmp_path_factory.mktemp("large")
    path = folder / "model" / "model.safetensors"
    path.parent.mkdir()
    (path.parent / "config.json").write_text(json.dumps(CONFIG))
    _write(path)
    assert path.stat().st_size >= MODEL_BYTES
    yield prepared_model(path.parent, folder / "store", CHUNK_BYTES)
    path.unlink()


@pytest.fixture(scope="module")
def of_library(model: ModelSpec) -> ModelSpec:
    assert model.source is not None and model.published is not None
    folder, store = Path(model.source), Path(model.published.uri)
    return prepared_model(folder, store, CHUNK_BYTES, family="transformers")


def _write(path: Path) -> None:
    """Random float32 weights, a megabyte at a time."""
    entries, at = {}, 0
    for name, shape in published_shapes(ModelSpec(**read_config(CONFIG).fields)).items():
        end = at + 4 * int(np.prod(shape))
        entries[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, end]}
        at = end
    header = json.dumps(entries).encode()
    block = np.random.default_rng(1).standard_normal(1 << 18, dtype=np.float32).tobytes()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for start in range(0, at, len(block)):
            file.write(block[: at - start])


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    with small_corpus(tmp_path_factory.mktemp("corpus")):
        yield Worlds(tmp_path_factory.mktemp("cache"))


@pytest.mark.seconds
@pytest.mark.parametrize("mesh", [{"dp_shard": 4}, {"tp": 2, "dp_shard": 2}], ids=str)
def test_a_rank_needs_its_share_the_largest_tensor_and_little_more(
    worlds: Worlds, model: ModelSpec, mesh: Mapping[str, int]
) -> None:
    spec = tiny_spec(mesh).model_copy(update={"model": model})
    for rank in worlds.run(programs.memory, spec):
        assert rank.share >= 3 * MODEL_BYTES / 4
        assert rank.peak >= 0.9 * rank.share  # or nothing was measured
        assert rank.peak <= rank.share + rank.largest + MARGIN_BYTES


@pytest.mark.seconds
def test_so_does_a_rank_with_a_model_of_the_library(worlds: Worlds, of_library: ModelSpec) -> None:
    spec = tiny_spec({"dp_shard": 4}).model_copy(update={"model": of_library})
    for rank in worlds.run(programs.memory, spec):
        assert rank.share >= 3 * MODEL_BYTES / 4
        assert 0.9 * rank.share <= rank.peak <= rank.share + rank.largest + MARGIN_BYTES
