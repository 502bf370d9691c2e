"""A function for each way to divide a model and each part that models have, and the same training
in torch alone.

Both sides build the model from the same seed, draw the same random numbers and read the same
samples; torch's side is written as its documentation says, by its own wrappers, with a mean over
the data-parallel ranks by hand where it has none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.support.ranks.rank_programs import join
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from holdfast_workers.data.sample_order import micro_batch_positions, samples_at
from holdfast_workers.functions import Context
from holdfast_workers.parallelize import process_groups
from holdfast_workers.parallelize.mesh import data_index, data_mesh, data_parallel
from holdfast_workers.spec import TrainingSpec
from holdfast_workers.training.recipe import World
from holdfast_workers.training.step_seeds import seed_generators

FUNCTION = "tests.support.ranks.function_cases:main"
POINTS = 96
DIVISIONS = ("plain", "ddp", "ddp over all", "fsdp2", "tp by hand")
PARTS = (
    "dropout",
    "batch norm",
    "an idle head",
    "heads by rank",
    "tied weights",
    "frozen parts",
    "own backward",
)


class CaseModel(nn.Module):
    """A small model with one of PARTS. `head` is the head that this rank uses."""

    def __init__(self, part: str, data_rank: int) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.middle: nn.Module = nn.Identity()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.heads = nn.ModuleDict({"a": nn.Linear(8, 2)})
        self.head = "a"
        if part == "dropout":
            self.middle = nn.Dropout(0.2)
        elif part == "batch norm":
            self.middle = nn.BatchNorm1d(8)
        elif part == "an idle head":
            self.heads["b"] = nn.Linear(8, 2)
        elif part == "heads by rank":
            self.heads["b"] = nn.Linear(8, 2)
            self.head = "ab"[data_rank % 2]
        elif part == "tied weights":
            self.middle = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
            self.middle[1].weight = self.middle[0].weight
        elif part == "frozen parts":
            self.first.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.middle(self.first(x).tanh())
        result: Tensor = self.heads[self.head](hidden + self.down(self.up(hidden).relu()))
        return result


def points() -> tuple[Tensor, Tensor]:
    x = torch.randn(POINTS, 4, generator=torch.Generator().manual_seed(3))
    return x, torch.stack([x.sum(dim=1).sin(), x.prod(dim=1)], dim=1)


def divided(model: CaseModel, mesh: DeviceMesh, division: str, part: str) -> nn.Module:
    """`model`, as a user divides it over `mesh`."""
    unused = part in ("an idle head", "heads by rank")
    if division == "ddp":
        return DistributedDataParallel(
            model, process_group=mesh.get_group("dp_shard"), find_unused_parameters=unused
        )
    if division == "ddp over all":
        return DistributedDataParallel(model, find_unused_parameters=unused)
    if division == "fsdp2":
        fully_shard(model, mesh=data_mesh(mesh))
    if division == "tp by hand":
        return parallelize_module(
            model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
        )
    return model


def main(ctx: Context) -> None:
    """Holdfast's side: a function, with `config.division` and `config.part`."""
    division, part = ctx.config["division"], ctx.config["part"]
    x, y = points()
    model = divided(CaseModel(part, ctx.data_index), ctx.mesh, division, part)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ctx.register(model=model, optimizer=optimizer)
    for _ in ctx.steps():
        total = 0.0
        for samples in ctx.batches(POINTS):
            loss = mse_loss(model(x[samples]), y[samples])
            if part == "own backward":
                torch.autograd.backward(loss * ctx.loss_weight)
                total += float(loss.detach()) * ctx.loss_weight
            else:
                ctx.backward(loss)
        ctx.step(loss=total if part == "own backward" else None)


def in_torch(port: int, cache_dir: Path, world: World, spec: TrainingSpec) -> list[float]:
    """Torch's side: the mean loss of each step."""
    join(port, world)
    division, part, train = spec.config["division"], spec.config["part"], spec.train
    mesh = init_device_mesh("cpu", tuple(world.mesh.values()), mesh_dim_names=tuple(world.mesh))
    seed_generators(train.seed, 0, 0, "cpu")
    x, y = points()
    model = divided(CaseModel(part, data_index(world)), mesh, division, part)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(1, train.last_step + 1):
        seed_generators(train.seed, step, data_index(world), "cpu")
        total, batches = torch.zeros(()), [*_batches(world, spec, step)]
        for samples, last in batches:
            with _without_sums(model, last):
                loss = mse_loss(model(x[samples]), y[samples]) / len(batches)
                total += loss.detach()
                torch.autograd.backward(loss)
        _average_by_hand(model, world, division)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(float(total) / world.world_size)
    process_groups.leave()
    return losses


def _batches(world: World, spec: TrainingSpec, step: int) -> Iterator[tuple[Any, bool]]:
    train, ranks = spec.train, data_parallel(world)
    count = train.global_batch // (train.micro_batch * ranks)
    for index in range(count):
        positions = micro_batch_positions(
            step - 1,
            index,
            data_index=data_index(world),
            data_parallel=ranks,
            micro_batch=train.micro_batch,
            global_batch=train.global_batch,
        )
        yield samples_at(positions, POINTS, train.seed), index == count - 1


def _without_sums(model: nn.Module, last: bool) -> Any:
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
    if isinstance(model, DistributedDataParallel) and not last:
        return model.no_sync()
    return nullcontext()


def _average_by_hand(model: nn.Module, world: World, division: str) -> None:
    """The mean over the ranks that read other samples, where no wrapper makes it."""
    tensor_parallel = world.size("tp")
    if division in {"ddp over all", "fsdp2"}:
        return
    peers = [rank for rank in range(world.world_size) if (rank - world.rank) % tensor_parallel == 0]
    group = dist.new_group(peers, use_local_synchronization=True)
    for parameter in model.parameters():
        count = torch.tensor(int(parameter.grad is not None))
        dist.all_reduce(count, group=group)
        if not int(count):
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient = parameter.grad
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        dist.all_reduce(local, group=group)
        local /= len(peers)
