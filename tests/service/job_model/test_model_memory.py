"""The modelled memory of the built-in model against the model itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, get_args

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from holdfast_service.job_model import model_memory
from holdfast_service.job_model.job_spec import parse
from holdfast_workers.models.llama import Llama, window_mask
from holdfast_workers.models.transformer import Transformer
from holdfast_workers.models.vit import VisionTransformer
from holdfast_workers.optim.local_optimizer import NoPeers
from holdfast_workers.optim.new_optimizer import local_parameter, new_optimizer
from holdfast_workers.parallelize import shard
from holdfast_workers.parallelize.context import apply_context_parallel
from holdfast_workers.parallelize.mesh import fake_process_group, make_mesh
from holdfast_workers.parallelize.parallel_model import apply_activation_checkpointing
from holdfast_workers.spec import (
    BYTE_VOCABULARY,
    ActivationCheckpointing,
    ContextMethod,
    ModelSpec,
    OptimizerName,
    ParallelSpec,
    TrainingSpec,
    TrainSpec,
)
from holdfast_workers.training.recipe import World

MODELS = (
    ModelSpec(dim=64, layers=2, heads=4, sequence_length=64),
    ModelSpec(dim=128, layers=4, heads=8, kv_heads=2, ffn_dim=256, sequence_length=128),
    ModelSpec(dim=64, layers=2, heads=4, kv_heads=2, head_size=32, qk_norm=True, vocabulary=500),
    ModelSpec(dim=64, layers=2, heads=4, kv_heads=2, head_size=8, sliding_window=16, qkv_bias=True),
    ModelSpec(family="vit", dim=64, layers=2, heads=4, image_size=32, patch_size=4, classes=10),
    ModelSpec(
        family="vit",
        dim=128,
        layers=4,
        heads=8,
        ffn_dim=256,
        image_size=64,
        patch_size=8,
        classes=100,
    ),
)


class Storages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the memory that operations allocate, and not that of `known` tensors."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self._made: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() in self._known:  # a view
                    continue
                reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self._made[storage._cdata] = (reference, storage.nbytes())
        return result

    def alive_bytes(self) -> int:
        made = self._made.values()
        return sum(nbytes for reference, nbytes in made if not bool(reference.expired()))


def built(spec: ModelSpec, apply: Callable[[Llama], None] = lambda model: None) -> Transformer:
    if spec.family == "vit":
        return VisionTransformer(spec)
    model = Llama(spec, spec.vocabulary or BYTE_VOCABULARY)
    apply(model)
    model.reset_tables()
    return model


def kept_bytes(
    spec: ModelSpec, micro_batch: int, apply: Callable[[Llama], None] = lambda model: None
) -> int:
    """Bytes of activations that are there when the forward pass has ended. `apply` divides the
    model."""
    model = built(spec, apply)
    mode, every = spec.activation_checkpointing, spec.activation_checkpointing_every
    apply_activation_checkpointing(model, mode, every)
    if isinstance(model, Llama):
        inputs = targets = torch.zeros((micro_batch, len(model.positions)), dtype=torch.long)
    else:
        size = spec.images.image_size
        inputs = torch.zeros((micro_batch, size, size, 3), dtype=torch.uint8)
        targets = torch.zeros(micro_batch, dtype=torch.long)
    window_mask.cache_clear()  # each pass makes its own
    with Storages([*model.parameters(), *model.buffers()]) as storages:
        logits = model(inputs)
        loss = functional.cross_entropy(logits.flatten(0, -2), targets.flatten())
        found: int = storages.alive_bytes()
    loss.backward()  # type: ignore[no-untyped-call]
    return found


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("spec", MODELS)
def test_the_model_counts_what_the_built_in_model_has_and_keeps(
    spec: ModelSpec, mode: ActivationCheckpointing
) -> None:
    def with_mode(mode: ActivationCheckpointing, layers: int = spec.layers) -> ModelSpec:
        return spec.model_copy(update={"activation_checkpointing": mode, "layers": layers})

    training = TrainingSpec(model=with_mode(mode), train=TrainSpec(micro_batch=2))
    found = model_memory.memory_model(training)
    assert found is not None
    model = built(spec)
    need = found.of({"dp_shard": 1, "tp": 1}, 4)
    assert need.parameters == shard.whole_bytes(model)
    kept = kept_bytes(with_mode(mode), 2)
    if mode != "none":
        assert kept < 0.8 * kept_bytes(with_mode("none"), 2)
        # In the backward pass, one block computes again what it would have kept.
        kept += kept_bytes(with_mode("none"), 2) - kept_bytes(with_mode("none", spec.layers - 1), 2)
    assert need.activations == pytest.approx(kept, rel=0.15)


def test_a_divided_sequence_divides_all_activations_but_those_at_the_head() -> None:
    training = TrainingSpec(model=MODELS[1], train=TrainSpec(micro_batch=2))
    divided = training.model_copy(update={"parallel": ParallelSpec(sequence_parallel=True)})
    whole, parts = model_memory.memory_model(training), model_memory.memory_model(divided)
    assert whole is not None and parts is not None
    alone, mesh = {"dp_shard": 1, "tp": 1}, {"dp_shard": 1, "tp": 4}
    assert parts.of(alone, 4) == whole.of(alone, 4)
    tokens, model = 2 * MODELS[1].sequence_length, MODELS[1]
    at_blocks = 4 * tokens * 4 * model.dim * model.layers
    saved = whole.of(mesh, 4).activations - parts.of(mesh, 4).activations
    assert saved == at_blocks * 3 // 4


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("method", ["all_gather", "ring", "ulysses"])
@pytest.mark.parametrize("size", [2, 4])
def test_the_model_counts_what_a_rank_with_a_part_of_each_sequence_keeps(
    size: int, method: ContextMethod, mode: ActivationCheckpointing
) -> None:
    spec = MODELS[1].model_copy(update={"kv_heads": 4, "activation_checkpointing": mode})
    world = World(0, size, {"dp_shard": 1, "cp": size, "tp": 1}, 0, "cpu")

    def divided(layers: int, mode: ActivationCheckpointing) -> int:
        with fake_process_group(world):
            axis = make_mesh(world, 60.0)["cp"]
            changes = {"layers": layers, "activation_checkpointing": mode}
            return kept_bytes(
                spec.model_copy(update=changes),
                2,
                lambda model: apply_context_parallel(model, axis, method),
            )

    training = TrainingSpec(
        model=spec, train=TrainSpec(micro_batch=2), parallel=ParallelSpec(context_method=method)
    )
    found = model_memory.memory_model(training)
    assert found is not None
    kept = divided(spec.layers, mode)
    if mode != "none":
        kept += divided(spec.layers, "none") - divided(spec.layers - 1, "none")
    assert found.of(world.mesh, 4).activations == pytest.approx(kept, rel=0.15)


def test_each_second_block_keeps_its_activations() -> None:
    spec = ModelSpec(dim=64, layers=4, heads=4, sequence_length=64)
    kept = [
        kept_bytes(spec.model_copy(update=changes), 2)
        for changes in (
            {},
            {"activation_checkpointing": "full", "activation_checkpointing_every": 2},
            {"activation_checkpointing": "full"},
        )
    ]
    assert kept[1] == pytest.approx((kept[0] + kept[2]) / 2, rel=0.02)


@pytest.mark.parametrize("name", get_args(OptimizerName))
def test_the_model_counts_the_moments_of_each_optimizer(name: OptimizerName) -> None:
    train = TrainSpec.model_validate({"optimizer": {"name": name}, "ema": 0.9})
    training = TrainingSpec(model=MODELS[0], train=train)
    found = model_memory.memory_model(training)
    assert found is not None
    need = found.of({"dp_shard": 1, "tp": 1}, 4)
    parameters = [
        local_parameter(
            parameter,
            torch.zeros(shape),
            shape,
            {},
            train.optimizer,
            in_block=parameter.startswith("blocks."),
        )
        for parameter, shape in model_memory.shapes_of(training).items()
    ]
    moments = new_optimizer(parameters, train.optimizer, NoPeers()).moments
    held = 4 * sum(moment.tensor.numel() for moment in moments)
    assert held + need.parameters == pytest.approx(need.moments, rel=0.05)


def test_a_group_without_a_parameter_is_a_fault() -> None:
    groups = ({"match": "*norm.weight"}, {"match": "norm.*"}, {"match": "*.bias"}, {"match": "*"})
    train = TrainSpec.model_validate({"optimizer": {"groups": groups}})
    found = model_memory.group_faults(TrainingSpec(train=train))
    assert [fault.path for fault in found] == [
        "train.optimizer.groups.1.match",
        "train.optimizer.groups.2.match",
    ]
    assert "no parameter belongs to the group '*.bias'" in found[1].message
    own = TrainingSpec(train=train, function="a.b:c")
    assert model_memory.group_faults(own) == []


def test_its_constants_are_those_of_the_workers() -> None:
    assert model_memory.SMALL_MODEL_BYTES == shard.SMALL_MODEL_BYTES


def test_the_memory_of_a_function_is_not_known_and_never_refused() -> None:
    limited = {"memory_per_worker_bytes": 1}
    spec = parse({"name": "own", "function": "a.b:train", "resources": limited}, None)
    assert spec.mesh_limits.memory_of(spec.parallel.mesh) is None
