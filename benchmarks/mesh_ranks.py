"""The ranks of `benchmarks.meshes`: the same training by Holdfast's core and by torch alone.

Both sides live in the same processes, on the same model and data, and take turns. torch's side uses
`fully_shard`, `parallelize_module`, `PipelineStage` and functional collectives as their
documentation shows; models are Holdfast's single-device code.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from tests.support.ranks import rank_programs
from tests.support.ranks.rank_worlds import RecordingHooks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from holdfast_workers.models.llama import Attention, Llama, repeated_heads
from holdfast_workers.parallelize import process_groups
from holdfast_workers.recipes.task import LanguageTask
from holdfast_workers.spec import TrainingSpec
from holdfast_workers.training.recipe import World
from holdfast_workers.training.step_loop import Steps


def alternate(
    port: int, cache_dir: Path, world: World, spec: TrainingSpec, rounds: int, steps: int
) -> list[tuple[float, float]]:
    """Seconds of a step, of Holdfast's core and of torch alone, for each round of `steps` steps of
    either. The side that goes first alternates."""
    torch.set_num_threads(1)
    rank_programs.join(port, world)
    ours, stock = _holdfast(cache_dir, world, spec), _stock(cache_dir, world, spec)
    for step in (ours, stock):
        step()  # allocates, and fills caches
        step()
    found = []
    for number in range(rounds):
        sides = (ours, stock) if number % 2 == 0 else (stock, ours)
        first, second = (_timed(side, steps) for side in sides)
        found.append((first, second) if number % 2 == 0 else (second, first))
    process_groups.leave()
    return found


def _timed(step: Callable[[], None], steps: int) -> float:
    dist.barrier()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    dist.barrier()
    return (time.perf_counter() - began) / steps


def _holdfast(cache_dir: Path, world: World, spec: TrainingSpec) -> Callable[[], None]:
    recipe = rank_programs.make(cache_dir, spec)
    recipe.build(world)
    recipe.initialize()
    driven = Steps(recipe, world, spec, RecordingHooks(), 0)

    def step() -> None:
        driven.apply()
        driven.keep()

    return step


def _stock(cache_dir: Path, world: World, spec: TrainingSpec) -> Callable[[], None]:
    task = LanguageTask(spec, cache_dir)
    mesh = init_device_mesh("cpu", tuple(world.mesh.values()), mesh_dim_names=tuple(world.mesh))
    model = task.new_model().to_empty(device="cpu")
    assert isinstance(model, Llama)
    with torch.no_grad():
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.02)
    model.reset_tables()
    if world.size("tp") > 1:
        _split(model, mesh["tp"])
    if world.size("cp") > 1:
        _divide_sequence(model, mesh["cp"])
    train, data = spec.train, world.size("dp_shard")
    batches = train.global_batch // (train.micro_batch * data)
    sharded = mesh["dp_shard", "cp"]._flatten("dp_cp") if world.size("cp") > 1 else mesh["dp_shard"]
    if world.size("pp") > 1:
        module: nn.Module = _Stage(model, mesh["pp"])
        passes = _pipeline(module, mesh["pp"], spec, sharded, batches)
    else:
        module = model
        _shard(module, sharded)
        passes = _accumulation(module, spec, batches)
    optimizer = torch.optim.AdamW(module.parameters(), lr=train.optimizer.lr, fused=True)
    chance = torch.Generator().manual_seed(world.coordinate("dp_shard"))

    def step() -> None:
        read = [
            task.batch(torch.randint(task.samples, (train.micro_batch,), generator=chance).numpy())
            for _ in range(batches)
        ]
        if world.size("cp") > 1:
            at, parts = world.coordinate("cp"), world.size("cp")
            read = [(x.chunk(parts, 1)[at], y.chunk(parts, 1)[at]) for x, y in read]
        passes([x for x, _ in read], [y for _, y in read])
        _clip([p.grad for p in module.parameters() if p.grad is not None], train.clip_grad_norm)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _shard(module: nn.Module, mesh: DeviceMesh) -> None:
    fully_shard(module, mesh=mesh, reshard_after_forward=False)
    assert isinstance(module, FSDPModule)
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)


def _accumulation(
    module: nn.Module, spec: TrainingSpec, batches: int
) -> Callable[[list[Tensor], list[Tensor]], None]:
    def passes(inputs: list[Tensor], targets: list[Tensor]) -> None:
        assert isinstance(module, FSDPModule)
        for index, (x, y) in enumerate(zip(inputs, targets, strict=True)):
            last = index == batches - 1
            module.set_requires_gradient_sync(last)
            module.set_reshard_after_backward(last)
            module.set_is_last_backward(last)
            torch.autograd.backward(_loss(module(x), y, spec))

    return passes


class _Stage(nn.Module):
    """Half of the model's blocks, with the embedding or the head."""

    def __init__(self, model: Llama, axis: DeviceMesh) -> None:
        super().__init__()
        at, parts = axis.get_local_rank(), axis.size()
        names = list(model.blocks)
        share = len(names) // parts
        self.embedding = model.embedding if at == 0 else None
        self.blocks = nn.ModuleList(
            model.blocks[name] for name in names[at * share : (at + 1) * share]
        )
        self.norm = model.norm if at == parts - 1 else None
        self.head = model.head if at == parts - 1 else None
        self.tables = model.tables()

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks:
            x = block(x, *self.tables)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


def _pipeline(
    module: nn.Module, axis: DeviceMesh, spec: TrainingSpec, sharded: DeviceMesh, batches: int
) -> Callable[[list[Tensor], list[Tensor]], None]:
    _shard(module, sharded)
    at, parts = axis.get_local_rank(), axis.size()
    rows = (spec.train.micro_batch, spec.model.sequence_length)
    with torch.device("meta"):
        tokens = torch.empty(rows, dtype=torch.int64)
        hidden = torch.empty((*rows, spec.model.dim), requires_grad=True)
        logits = torch.empty((*rows, 256), requires_grad=True)
    stage = PipelineStage(
        module,
        at,
        parts,
        torch.device("cpu"),
        input_args=(tokens if at == 0 else hidden,),
        output_args=(logits if at == parts - 1 else hidden,),
        group=axis.get_group(),
    )
    schedule = Schedule1F1B(
        stage, batches, loss_fn=lambda x, y: _loss(x, y, spec), scale_grads=False
    )

    def passes(inputs: list[Tensor], targets: list[Tensor]) -> None:
        arguments = (torch.cat(inputs),) if at == 0 else ()
        options: dict[str, Any] = {}
        if at == parts - 1:
            options = {"target": torch.cat(targets), "losses": []}
        schedule.step(*arguments, return_outputs=False, **options)

    return passes


def _loss(logits: Tensor, targets: Tensor, spec: TrainingSpec) -> Tensor:
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return total / (spec.train.global_batch * spec.model.sequence_length)


def _split(model: Llama, axis: DeviceMesh) -> None:
    for block in model.blocks.values():
        plan = {
            **{f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
            "attention.output": RowwiseParallel(),
            **{f"feed_forward.{name}": ColwiseParallel() for name in ("gate", "up")},
            "feed_forward.down": RowwiseParallel(),
        }
        parallelize_module(block, axis, plan)


def _divide_sequence(model: Llama, axis: DeviceMesh) -> None:
    """Each rank has neighbouring positions, and gathers keys and values."""
    at, parts = axis.get_local_rank(), axis.size()
    length = model.sequence_length // parts
    own = slice(at * length, (at + 1) * length)
    for name in ("cos", "sin"):
        model.register_buffer(name, model.get_buffer(name)[own].clone(), persistent=False)
    seen = torch.arange(at * length, (at + 1) * length)[:, None] >= torch.arange(length * parts)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        whole = [
            functional.all_gather_tensor_autograd(x.contiguous(), 2, axis.get_group())
            for x in (key, value)
        ]
        key, value = (
            repeated_heads(functional.wait_tensor(x), query)  # type: ignore[no-untyped-call]
            for x in whole
        )
        return F.scaled_dot_product_attention(query, key, value, attn_mask=seen)

    for module in model.modules():
        if isinstance(module, Attention):
            module.attend = attend  # type: ignore[method-assign]


def _clip(gradients: list[Tensor], limit: float | None) -> None:
    """Scale the local pieces by the norm of all; those that several ranks have count several
    times."""
    pieces = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
    total = torch.stack(torch._foreach_norm(pieces)).square().sum()
    dist.all_reduce(total)
    norm = float(total.sqrt())
    if limit is not None and norm > limit:
        torch._foreach_mul_(pieces, limit / norm)
