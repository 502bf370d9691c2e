"""A function that uses its whole context, written against Holdfast 0.1.

NEVER EDIT THIS FILE. It stands for the programs of users, which a change of Holdfast does not edit
either (docs/recipes.md, "What is promised"). If it breaks, mend Holdfast.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from holdfast_workers.functions import Context, FunctionError
from holdfast_workers.progress import beacon

POINTS = torch.linspace(-1.0, 1.0, 96).reshape(96, 1)


class Average:
    """A state of the user's own: the mean of the losses."""

    def __init__(self) -> None:
        self.mean = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean = state["mean"]


def main(ctx: Context) -> None:
    """A curve through points, by a sharded model; every second step evaluates."""
    assert 0 <= ctx.rank < ctx.world_size
    assert ctx.attempt >= 0 and ctx.seed >= 0
    model = nn.Sequential(nn.Linear(1, 16), nn.Dropout(0.1), nn.Tanh(), nn.Linear(16, 1))
    model.to(ctx.device)
    ctx.shard(model, blocks=[model[0]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=ctx.config.get("lr", 0.01))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=ctx.last_step)
    average = Average()
    ctx.register(model=model, optimizer=optimizer)
    ctx.register(schedule=schedule, average=average)
    number = next(ctx.steps(), ctx.last_step)
    with suppress(FunctionError):  # it is too late once a step has been requested
        ctx.register(late=average)
        raise AssertionError("a part was registered after the first step")
    while not ctx.should_stop:
        summed = 0.0
        for samples in ctx.batches(len(POINTS)):
            loss = (model(POINTS[samples]) - POINTS[samples].sin()).square().mean()
            ctx.backward(loss)
            summed += float(loss.detach())
        mean = torch.tensor(summed / ctx.micro_batches)
        with beacon.phase("evaluate", bound_s=60.0):
            if ctx.world_size > 1:
                dist.all_reduce(mean, group=ctx.mesh.get_group("dp_shard"))
        metrics: dict[str, float | torch.Tensor] = {
            "share": ctx.data_index / ctx.data_parallel,
            "error/mean": mean,
        }
        ctx.step(
            float(mean) / ctx.data_parallel,
            tokens=8,
            clip_grad_norm=1.0,
            metrics=metrics if number % 2 else None,
        )
        schedule.step()
        average.mean += (float(mean) - average.mean) / number
        number += 1
