"""The modelled memory of the built-in model against the model itself."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from holdfast_service.job_model import model_memory
from holdfast_service.job_model.job_spec import parse
from holdfast_workers.data.corpus import BYTE_VOCABULARY
from holdfast_workers.models.llama import Llama
from holdfast_workers.parallelize import shard
from holdfast_workers.spec import ModelSpec, TrainingSpec, TrainSpec

MODELS = (
    ModelSpec(dim=64, layers=2, heads=4, sequence_length=64),
    ModelSpec(dim=128, layers=4, heads=8, kv_heads=2, ffn_dim=256, sequence_length=128),
)


def saved_bytes(model: Llama, tokens: torch.Tensor) -> int:
    """Bytes that autograd keeps for the backward pass, parameters not counted."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    own |= {table.untyped_storage().data_ptr() for table in model.buffers()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = model(tokens)
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    kept[logits.untyped_storage().data_ptr()] = logits.untyped_storage().nbytes()
    loss.backward()  # type: ignore[no-untyped-call]
    return sum(kept.values())


@pytest.mark.parametrize("spec", MODELS)
def test_the_model_counts_what_the_built_in_model_has_and_keeps(spec: ModelSpec) -> None:
    training = TrainingSpec(model=spec, train=TrainSpec(micro_batch=2))
    found = model_memory.memory_model(training)
    assert found is not None
    model = Llama(spec, BYTE_VOCABULARY)
    model.reset_tables()
    need = found.of({"dp_shard": 1, "tp": 1}, 4)
    assert need.parameters == shard.whole_bytes(model)
    tokens = torch.zeros((2, spec.sequence_length), dtype=torch.long)
    assert need.activations == pytest.approx(saved_bytes(model, tokens), rel=0.15)


def test_its_constants_are_those_of_the_workers() -> None:
    assert model_memory.VOCABULARY == BYTE_VOCABULARY
    assert model_memory.SMALL_MODEL_BYTES == shard.SMALL_MODEL_BYTES


def test_the_memory_of_a_function_is_not_known_and_never_refused() -> None:
    limited = {"memory_per_worker_bytes": 1}
    spec = parse({"name": "own", "function": "a.b:train", "resources": limited}, None)
    assert spec.mesh_limits.memory_of(spec.parallel.mesh) is None
