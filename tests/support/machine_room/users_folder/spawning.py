"""A user's training function whose data come from spawned processes, which import Holdfast."""

from __future__ import annotations

import time

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset

from holdfast_workers import build
from holdfast_workers.functions import Context

POINTS = 32
STEP_S = 0.03


class Builds(Dataset[tuple[torch.Tensor, str, str]]):
    """Points, each with the build and the file of the Holdfast that its process has imported."""

    def __len__(self) -> int:
        return POINTS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, str, str]:
        return torch.full((4,), index / POINTS), build.LOADED, build.__file__


def train(ctx: Context) -> None:
    loader = DataLoader(Builds(), batch_size=POINTS, num_workers=1, multiprocessing_context="spawn")
    ((points, builds, files),) = list(loader)
    print(f"spawned with build {builds[0]} from {files[0]}")
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    ctx.register(model=model, optimizer=optimizer)
    for _ in ctx.steps():
        for samples in ctx.batches(POINTS):
            ctx.backward(mse_loss(model(points[samples]), points[samples].sum(1, keepdim=True)))
        time.sleep(STEP_S)
        ctx.step()
