"""Applies the parallelisms of a spec, and activation checkpointing, to a model on the meta device,
in their order of nesting."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from holdfast_workers.models.llama import Llama
from holdfast_workers.models.transformer import BlockModel, Transformer
from holdfast_workers.parallelize.context import apply_context_parallel
from holdfast_workers.parallelize.mesh import (
    CONTEXT_AXIS,
    PIPELINE_AXIS,
    TENSOR_AXIS,
    data_mesh,
    data_parallel,
    state_shards,
)
from holdfast_workers.parallelize.pipeline import keep_stages
from holdfast_workers.parallelize.replicate import is_replicated_only
from holdfast_workers.parallelize.sequence import apply_sequence_parallel
from holdfast_workers.parallelize.shard import apply_fully_shard
from holdfast_workers.parallelize.stage_split import split_stages, stages_of
from holdfast_workers.parallelize.tensor import apply_tensor_parallel
from holdfast_workers.parallelize.vocabulary import apply_vocabulary_parallel
from holdfast_workers.spec import ActivationCheckpointing, ModelSpec, TrainingSpec
from holdfast_workers.training.recipe import World

_aten = torch.ops.aten
KEPT_RESULTS = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
    }
)
"""Operations whose results `selective` keeps. No collective is among them. The all-reduce of tensor
parallelism works in place: its result, kept, would be summed over again, and the gradients would be
wrong without an error."""


def needs_mesh(world: World, spec: ModelSpec) -> bool:
    """Whether a model of `world` communicates, or needs FSDP for its precision."""
    return world.world_size > 1 or _is_mixed(spec)


def apply_parallelism(
    model: BlockModel,
    world: World,
    mesh: DeviceMesh | None,
    spec: TrainingSpec,
    head_in_blocks: float,
) -> None:
    """Divide `model` in place over `mesh`, which is None where :func:`needs_mesh` is False.
    `head_in_blocks`: the work of the head, as a number of blocks."""
    parallel = spec.parallel
    if mesh is not None and world.size(CONTEXT_AXIS) > 1:
        assert isinstance(model, Llama)  # no other family has a causal order
        apply_context_parallel(model, mesh[CONTEXT_AXIS], parallel.context_method)
    if mesh is not None and world.size(TENSOR_AXIS) > 1:
        assert isinstance(model, Transformer)
        if parallel.sequence_parallel:
            apply_sequence_parallel(model, mesh[TENSOR_AXIS])
        else:
            apply_tensor_parallel(model, mesh[TENSOR_AXIS])
        if parallel.vocabulary_parallel:
            assert isinstance(model, Llama)  # no other family has a vocabulary
            apply_vocabulary_parallel(model, mesh[TENSOR_AXIS])
    apply_activation_checkpointing(
        model, spec.model.activation_checkpointing, spec.model.activation_checkpointing_every
    )
    if (pp := world.size(PIPELINE_AXIS)) > 1:
        parts = split_stages(pp * parallel.stages_on_a_rank, spec.model.layers, head_in_blocks)
        own = stages_of(parallel, pp, world.coordinate(PIPELINE_AXIS))
        assert isinstance(model, Transformer)
        keep_stages(model, [parts[index] for index in own], spec.model.tied_embeddings)
    if spec.model.compile:
        for block in model.blocks.values():
            block.compile()
    if is_replicated_only(world, spec.model):  # `GradientSums` do it, once the model is in memory
        return
    # FSDP implements mixed precision, so it is applied even where there is nothing to shard.
    is_shared = max(data_parallel(world), state_shards(world)) > 1
    if mesh is not None and (is_shared or _is_mixed(spec.model)):
        apply_fully_shard(model, data_mesh(mesh), getattr(torch, spec.model.dtype), parallel.zero)


def _is_mixed(spec: ModelSpec) -> bool:
    return spec.dtype != "float32"


def apply_activation_checkpointing(
    model: BlockModel, mode: ActivationCheckpointing, every: int = 1
) -> None:
    """Let each `every`-th block of `model`, from the first one on, compute activations again in the
    backward pass instead of keeping them; in place.

    `full` keeps the input of a block only (Chen et al. 2016, arXiv:1604.06174). `selective` keeps
    the results of matrix products and of attention too, which are most of the work and little of
    the memory. Both give the same bits as no checkpointing: the same operations run again, on the
    same numbers, with the same dropout masks.

    The block's `forward` is replaced, so names of parameters stay; FSDP's hooks are around it, so
    parameters are gathered once for the pass that computes again.
    """
    for block in list(model.blocks.values())[::every] if mode != "none" else ():
        block.forward = partial(_checkpointed, block.forward, mode == "selective")


def _checkpointed(forward: Callable[..., Any], selective: bool, *args: Any, **kwargs: Any) -> Any:
    options: dict[str, Any] = {}
    if selective:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    output: Any = checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)
    return output


def _policy(_context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    kept = operation in KEPT_RESULTS
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
