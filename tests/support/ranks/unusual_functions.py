"""Functions as users write them, each with a habit that was trained wrongly once."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from holdfast_workers.functions import Context


def _inputs(samples: Any) -> torch.Tensor:
    return torch.as_tensor(samples, dtype=torch.float32)[:, None] / 12 + torch.arange(4)


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def _turn(ctx: Context, model: nn.Module, *, skips: bool = False) -> None:
    for index, samples in enumerate(ctx.batches(12)):
        if not (skips and index == ctx.micro_batches - 1):
            ctx.backward(mse_loss(model(_inputs(samples)), torch.ones(len(samples), 2)))
    ctx.step()


def counts_steps_in_a_hook(ctx: Context) -> None:
    """Its last metric is the number of steps that the hook has seen."""
    model, seen = _model(), [0]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    optimizer.register_step_post_hook(lambda *_: seen.__setitem__(0, seen[0] + 1))
    ctx.register(model=model, optimizer=optimizer)
    for step in ctx.steps():
        assert seen[0] == step - 1
        _turn(ctx, model)


class GlobalState(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.state["all"]["steps"] = self.state["all"].get("steps", 0) + 1  # type: ignore[index]


class CountsItself(torch.optim.SGD):
    count = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.count = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.count += 1


OPTIMIZERS = {"all": GlobalState, "count": CountsItself, "sgd": torch.optim.SGD}


def optimizes(ctx: Context) -> None:
    """With the optimizer `config.optimizer`, whose momentum begins in step 3."""
    model = _model()
    optimizer = OPTIMIZERS[ctx.config["optimizer"]](model.parameters(), lr=1e-2)
    ctx.register(model=model, optimizer=optimizer)
    for step in ctx.steps():
        if step == 3:
            optimizer.param_groups[0]["momentum"] = 0.9
        _turn(ctx, model)


def whole_numbers(ctx: Context) -> None:
    """A quantized layer, whose parameters the optimizer has but does not train."""
    model = _model()
    table = nn.ParameterList([nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)])
    optimizer = torch.optim.AdamW([*model.parameters(), *table.parameters()], lr=1e-2)
    ctx.register(model=model, table=table, optimizer=optimizer)
    for _ in ctx.steps():
        _turn(ctx, model)


def changes_its_parts(ctx: Context) -> None:
    """`config.how`: the change of a registered module in step 3."""
    model, average = _model(), _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    ctx.register(model=model, average=average, optimizer=optimizer)
    for step in ctx.steps():
        if step == 3:
            if ctx.config["how"] == "assigns":
                average.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
            elif ctx.config["how"] == "appends":
                average.append(nn.Linear(2, 2))
            else:
                average.register_buffer("late", torch.zeros(2))
        _turn(ctx, model)


def swaps_weights(ctx: Context) -> None:
    """From step `config.since`, each turn begins with other weights, and puts the own ones back."""
    model = _model()
    ctx.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-2))
    for step in ctx.steps():
        if step >= ctx.config["since"]:
            own = copy.deepcopy(model.state_dict())
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            model.load_state_dict(own)
        _turn(ctx, model)


def unfreezes(ctx: Context) -> None:
    """A part that is frozen when DDP is made, with `config.wrapped`, is trained from step 3."""
    model: nn.Module = _model()
    head = model[0]  # type: ignore[index]
    head.requires_grad_(False)
    if ctx.config["wrapped"]:
        model = DistributedDataParallel(model, process_group=ctx.mesh.get_group("dp_shard"))
    ctx.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-1))
    for step in ctx.steps():
        head.requires_grad_(step >= 3)
        _turn(ctx, model)


def skips_the_last_micro_batch(ctx: Context) -> None:
    """In step 2, of a model that is `config.divided`."""
    model: nn.Module = _model()
    if ctx.config["divided"] == "fsdp":
        ctx.shard(model)
    elif ctx.config["divided"] == "ddp":
        model = DistributedDataParallel(model, process_group=ctx.mesh.get_group("dp_shard"))
    ctx.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-2))
    for step in ctx.steps():
        _turn(ctx, model, skips=step == 2)


def default_mesh(ctx: Context) -> None:
    model = _model()
    fully_shard(model)
    ctx.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-2))
    for _ in ctx.steps():
        _turn(ctx, model)


def wraps_beside(ctx: Context) -> None:
    """Registers the bare model, and trains it through a wrapper."""
    model = _model()
    ctx.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-2))
    wrapped = DistributedDataParallel(model)
    for _ in ctx.steps():
        _turn(ctx, wrapped)
