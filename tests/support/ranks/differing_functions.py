"""Functions whose ranks differ where they must not, or that change what was registered."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from holdfast_workers.functions import Context


def _train(ctx: Context, model: nn.Module, **others: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    ctx.register(model=model, optimizer=optimizer, **others)
    for _ in ctx.steps():
        for samples in ctx.batches(12):
            ctx.backward(mse_loss(model(_inputs(samples)), torch.ones(len(samples), 2)))
        ctx.step()


def _inputs(samples: Any) -> torch.Tensor:
    return torch.as_tensor(samples, dtype=torch.float32)[:, None] / 12 + torch.arange(4)


class Kept:
    """An object with one value."""

    def __init__(self, value: object) -> None:
        self.value = value

    def state_dict(self) -> dict[str, object]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.value = state["value"]


def object_by_rank(ctx: Context) -> None:
    _train(ctx, nn.Linear(4, 2), counter=Kept(ctx.rank), same=Kept("the same"))


def rate_by_rank(ctx: Context) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * (1 + ctx.rank))
    ctx.register(model=model, optimizer=optimizer)
    for _ in ctx.steps():
        ctx.step(0.0)


def shape_by_rank(ctx: Context) -> None:
    """A parameter that the ranks divide by hand, in unequal parts."""
    _train(ctx, nn.Linear(4, 2), part=nn.Linear(2, 3 + ctx.rank))


def half_by_rank(ctx: Context) -> None:
    """A parameter that the ranks of `tp` divide by hand."""
    part = nn.Linear(2, 3)
    with torch.no_grad():
        part.weight += ctx.mesh.get_local_rank("tp")
    _train(ctx, nn.Linear(4, 2), part=part)


class ChangesOnOneRank(nn.Linear):
    """From its fourth pass on, its weights change on one rank."""

    def __init__(self, changes: bool) -> None:
        super().__init__(4, 2)
        self.changes, self.passes = changes, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        if self.changes and self.passes >= 4:
            self.weight.data += 1e-6
        return super().forward(x)


def changes_on_one_rank(ctx: Context) -> None:
    _train(ctx, ChangesOnOneRank(ctx.rank == 1))


def adds_a_group(ctx: Context) -> None:
    """The optimizer grows while it trains."""
    model, head = nn.Linear(4, 2), nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    ctx.register(model=model, head=head, optimizer=optimizer)
    for step in ctx.steps():
        for samples in ctx.batches(12):
            x = _inputs(samples)
            ctx.backward(mse_loss(model(x) + head(x), torch.ones(len(samples), 2)))
        if step == 3:
            optimizer.add_param_group({"params": list(head.parameters())})
        ctx.step()


def two_names(ctx: Context) -> None:
    """With `config.twice`, the last layer is registered once more under a name of its own."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    again = {"again": model[2]} if ctx.config["twice"] else {}
    ctx.register(model=model, optimizer=optimizer, **again)
    for _ in ctx.steps():
        for samples in ctx.batches(12):
            ctx.backward(mse_loss(model(_inputs(samples)), torch.ones(len(samples), 2)))
        ctx.step(clip_grad_norm=0.01)


def own_backward(ctx: Context) -> None:
    """`config.by`: how the loss of a micro-batch gets its weight."""
    model = nn.Linear(4, 2)
    ctx.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-2))
    for _ in ctx.steps():
        total = 0.0
        for samples in ctx.batches(12):
            loss = mse_loss(model(_inputs(samples)), torch.ones(len(samples), 2))
            if ctx.config["by"] == "context":
                ctx.backward(loss)
                continue
            weight = ctx.loss_weight if ctx.config["by"] == "weight" else 1 / ctx.micro_batches
            torch.autograd.backward(loss * weight)
            total += float(loss.detach()) * weight
        ctx.step(loss=None if ctx.config["by"] == "context" else total)


def wrapped_over_others(ctx: Context) -> None:
    """DDP over the ranks of `tp`, which read the same samples."""
    model = nn.Linear(4, 2)
    _train(ctx, DistributedDataParallel(model, process_group=ctx.mesh.get_group("tp")))


def divided_by_hand_over_data(ctx: Context) -> None:
    """A DTensor over an axis with different samples that FSDP does not manage."""
    model = nn.Linear(4, 2)
    mesh = ctx.mesh["dp_shard"]
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Replicate()]))
    _train(ctx, model)


def leaves_the_last_micro_batch_out(ctx: Context) -> None:
    model = nn.Linear(4, 2)
    ctx.shard(model)
    ctx.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-2))
    for _ in ctx.steps():
        for samples in ctx.batches(12):
            ctx.backward(mse_loss(model(_inputs(samples)), torch.ones(len(samples), 2)))
            break
        ctx.step()
