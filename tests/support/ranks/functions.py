"""Small training functions as users write them, with every kind of state."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from holdfast_workers.functions import Context

POINTS = 96
LAST_LINES = 4_000


class Counter:
    """A user-defined stateful object."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[int, float]] = {}
        self.turns = 0

    def state_dict(self) -> dict[str, object]:
        return dict(self.__dict__)

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2)
        )
        self.unused = nn.Parameter(torch.ones(3))  # takes no part in the loss

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(x)
        return result


def data() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(POINTS, 4, generator=torch.Generator().manual_seed(3))
    return x, torch.stack([x.sum(dim=1).sin(), x.prod(dim=1)], dim=1)


def everything(ctx: Context) -> None:
    """Dropout, buffers, an average, a schedule, an object; momentum that the first step creates."""
    x, y = data()
    model, average = Net(), Net()
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=ctx.last_step + 1)
    counter = Counter()
    ctx.register(
        model=model, average=average, optimizer=optimizer, schedule=schedule, counter=counter
    )
    for step in ctx.steps():
        for samples in ctx.batches(POINTS):
            noise = 0.01 * torch.randn(len(samples), 4)
            ctx.backward(mse_loss(model(x[samples] + noise), y[samples]))
        ctx.step(clip_grad_norm=1.0)
        schedule.step()
        with torch.no_grad():
            for mean, live in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(live, 0.1)
        counter.turns += 1
        counter.seen[step % 3] = (step, ctx.rank / 3)  # another on each rank


def grows(ctx: Context) -> None:
    """An object that grows by 400 bytes in a step, and outgrows its room twice in 24 steps."""
    x, y = data()
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    history = Counter()
    ctx.register(model=model, optimizer=optimizer, history=history)
    for step in ctx.steps():
        for samples in ctx.batches(POINTS):
            ctx.backward(mse_loss(model(x[samples]), y[samples]))
        ctx.step(metrics={"kept": len(history.seen)})
        history.seen[step] = (step, step / 3)
        history.__dict__[f"line_{step}"] = "x" * 350


def plain(ctx: Context) -> None:
    """A whole model on every rank; Holdfast averages the gradients."""
    x, y = data()
    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ctx.register(model=model, optimizer=optimizer)
    for _ in ctx.steps():
        for samples in ctx.batches(POINTS):
            ctx.backward(mse_loss(model(x[samples]), y[samples]))
        ctx.step()


def talkative(ctx: Context) -> None:
    """As `plain`; in the end, rank 0 writes `LAST_LINES` lines at once."""
    plain(ctx)
    if ctx.rank == 0:
        for number in range(LAST_LINES):
            print(f"last line {number}")
        sys.stdout.flush()
        time.sleep(1.5)  # until they are read


def with_helpers(ctx: Context) -> None:
    """As `plain`, beside helper processes as a data loader has them."""
    helpers = [subprocess.Popen(["sleep", "600"]) for _ in range(8)]
    plain(ctx)
    for helper in helpers:
        helper.kill()


def sharded(ctx: Context) -> None:
    """A model sharded over the data-parallel ranks."""
    x, y = data()
    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
    ctx.shard(model, blocks=[model[0]])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    ctx.register(model=model, optimizer=optimizer)
    for _ in ctx.steps():
        for samples in ctx.batches(POINTS):
            ctx.backward(mse_loss(model(x[samples]), y[samples]))
        ctx.step()


def reports_metrics(ctx: Context) -> None:
    """Reports user metrics: one in every step, another in every second step."""
    x, y = data()
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    ctx.register(model=model, optimizer=optimizer)
    for step in ctx.steps():
        error = 0.0
        for samples in ctx.batches(POINTS):
            loss = mse_loss(model(x[samples]), y[samples])
            error = float(loss.detach().sqrt())
            ctx.backward(loss)
        metrics = {"error": error} | ({"val/acc": step} if step % 2 == 0 else {})
        ctx.step(metrics=None if ctx.config.get("silent") else metrics)


class Averaging(nn.Linear):
    """Assigns to its buffer in each pass, as many modules do."""

    def __init__(self) -> None:
        super().__init__(4, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.mean: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = super().forward(x)
        self.mean = 0.9 * self.mean + 0.1 * result.detach().mean(0)
        return result - self.mean


def assigns_to_a_buffer(ctx: Context) -> None:
    x, y = data()
    model = Averaging()
    ctx.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-2))
    for _ in ctx.steps():
        for samples in ctx.batches(POINTS):
            ctx.backward(mse_loss(model(x[samples]), y[samples]))
        if ctx.config.get("grows"):
            model.mean = torch.cat([model.mean, model.mean])
            model.mean = model.mean[: 2 + ctx.attempt]
        ctx.step()


def swallows(ctx: Context) -> None:
    """Catches every exception that it can."""
    x, y = data()
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    ctx.register(model=model, optimizer=optimizer)
    for _ in ctx.steps():
        try:
            for samples in ctx.batches(POINTS):
                ctx.backward(mse_loss(model(x[samples]), y[samples]))
            ctx.step()
        except Exception as error:
            print("swallowed", error)


def mistaken(ctx: Context) -> None:
    """A mistake of the user at step 5, on every rank."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    ctx.register(model=model, optimizer=optimizer)
    for step in ctx.steps():
        ctx.backward(model(torch.ones(2, 4)).sum())
        if step == 5:
            print("a name that is no text: \udcff")
            raise KeyError("the user's own mistake")
        ctx.step()


def poisoned(ctx: Context) -> None:
    """The samples in `ctx.config["bad"]` make the loss non-finite."""
    x, y = data()
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    ctx.register(model=model, optimizer=optimizer)
    bad = set(ctx.config["bad"])
    for _ in ctx.steps():
        for samples in ctx.batches(POINTS):
            spoiled = float("nan") if bad & set(samples.tolist()) else 1.0
            ctx.backward(mse_loss(model(x[samples]), y[samples]) * spoiled)
        ctx.step()


def steps_itself(ctx: Context) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    ctx.register(model=model, optimizer=optimizer)
    for _ in ctx.steps():
        ctx.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
        ctx.step()


def forgets_to_step(ctx: Context) -> None:
    model = nn.Linear(4, 2)
    ctx.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-2))
    for _ in ctx.steps():
        pass


def returns_early(ctx: Context) -> None:
    model = nn.Linear(4, 2)
    ctx.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-2))
    for step in ctx.steps():
        ctx.backward(model(torch.ones(2, 4)).sum())
        ctx.step()
        if step == 3:
            return


def registers_foreign_parameters(ctx: Context) -> None:
    ctx.register(model=nn.Linear(4, 2), optimizer=torch.optim.SGD(nn.Linear(4, 2).parameters()))
    for _ in ctx.steps():
        ctx.step(0.0)


def has_sparse_gradients(ctx: Context) -> None:
    table = nn.Embedding(POINTS, 2, sparse=True)
    ctx.register(table=table, optimizer=torch.optim.SGD(table.parameters(), lr=1e-2))
    for _ in ctx.steps():
        for samples in ctx.batches(POINTS):
            ctx.backward(table(torch.from_numpy(samples)).sum())
        ctx.step()


def shows_environment(ctx: Context) -> None:
    """Prints the environment of its process and its threads, before the first step."""
    for name, value in sorted(os.environ.items()):
        print(f"variable {name}={value}")
    print(f"torch computes with {torch.get_num_threads()} threads")
    plain(ctx)


def elastic(ctx: Context) -> None:
    """Every kind of state, on as many ranks as there are: sharded (with `config.sharded`), whole,
    and plain objects. Steps are slow in the attempt `config.slow_in`."""
    x, y = data()
    model = nn.Sequential(nn.Linear(4, 30), nn.Tanh(), nn.Linear(30, 2))
    if ctx.config["sharded"]:
        ctx.shard(model, blocks=[model[0]])
    average = nn.Linear(4, 30)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=ctx.last_step + 1)
    counter = Counter()
    ctx.register(
        model=model, average=average, optimizer=optimizer, schedule=schedule, counter=counter
    )
    for step in ctx.steps():
        time.sleep(0.2 if ctx.attempt == ctx.config["slow_in"] else 0.01)
        for samples in ctx.batches(POINTS):
            ctx.backward(mse_loss(model(x[samples]), y[samples]))
        counter.turns += 1
        counter.seen[step % 3] = (step, step / 3)
        counter.__dict__[f"line_{step}"] = "x" * 350  # outgrows its room
        with torch.no_grad():
            average.weight.lerp_(torch.full((30, 4), float(step)), 0.1)
        metrics: dict[str, Any] = {
            "world": ctx.world_size,
            "turns": counter.turns,
            "average": average.weight.sum(),
            "lr_of_schedule": schedule.get_last_lr()[0],
        }
        ctx.step(clip_grad_norm=1.0, metrics=metrics)
        schedule.step()
    print("the loop has ended")


def replicated(ctx: Context) -> None:
    """A whole model on every rank, wrapped in DDP as a whole or in part as `config.wrapped` says
    (default: as a whole), beside a whole model that is not wrapped."""
    x, y = data()
    group, wrapped = ctx.mesh.get_group("dp_shard"), ctx.config.get("wrapped", "whole")
    hidden = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 32))
    inner = DistributedDataParallel(hidden, process_group=group) if wrapped == "inner" else hidden
    model: nn.Module = nn.Sequential(inner, nn.Linear(32, 2))
    if wrapped == "whole":
        model = DistributedDataParallel(model, process_group=group)
    shift = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW([*model.parameters(), *shift.parameters()], lr=1e-2)
    ctx.register(model=model, shift=shift, optimizer=optimizer)
    for _ in ctx.steps():
        for samples in ctx.batches(POINTS):
            ctx.backward(mse_loss(model(x[samples]) + shift(x[samples]), y[samples]))
            if ctx.config.get("breaks"):
                break
        ctx.step(clip_grad_norm=1.0)


class OddTensors(nn.Module):
    """A parameter in channels_last, a transposed one, and buffers of rare types and forms."""

    turns: torch.Tensor
    scale: torch.Tensor
    repeated: torch.Tensor
    phase: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.turned = nn.Parameter(torch.randn(2, 3).t())
        self.register_buffer("turns", torch.zeros(1, dtype=torch.uint16))
        self.register_buffer("scale", torch.ones(3).to(torch.float8_e4m3fn))
        self.register_buffer("repeated", torch.randn(1, 3).expand(4, 3))
        self.register_buffer("phase", torch.randn(2, dtype=torch.complex64).conj())
        self.register_buffer("table", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pixels = self.image(x[:, :, None, None].reshape(-1, 2, 2, 1).expand(-1, 2, 2, 2))
        result: torch.Tensor = (pixels.flatten(1) + self.repeated[0]) @ self.turned
        return result


def odd_tensors(ctx: Context) -> None:
    x, y = data()
    model = OddTensors()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    ctx.register(model=model, optimizer=optimizer)
    for step in ctx.steps():
        for samples in ctx.batches(POINTS):
            ctx.backward(mse_loss(model(x[samples]), y[samples]))
        ctx.step(clip_grad_norm=1.0)
        model.turns.fill_(step)
        model.scale.copy_(torch.full((3,), step / 8).to(model.scale.dtype))
        model.repeated[:1].mul_(1.01)
        model.phase.mul_(1j)
        assert model.turned.stride() == (1, 3)
