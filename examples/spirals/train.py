"""Classify the points of three spirals: a custom model and custom data, trained with Holdfast.

python train.py                          one process, for debugging
torchrun --nproc-per-node 2 train.py     two processes
holdfast submit job.yaml --follow        on the cluster, fault-tolerant
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

ARMS, POINTS = 3, 4000


def spirals() -> tuple[torch.Tensor, torch.Tensor]:
    """Points (x, y) and the number of each point's arm; the same on every rank."""
    noise = torch.Generator().manual_seed(0)
    arm = torch.arange(ARMS * POINTS) % ARMS
    along = torch.rand(len(arm), generator=noise)
    angle = 7 * along + 2 * torch.pi * arm / ARMS + 0.1 * torch.randn(len(arm), generator=noise)
    return torch.stack([along * angle.cos(), along * angle.sin()], dim=1), arm


def main(ctx) -> None:
    points, arms = (tensor.to(ctx.device) for tensor in spirals())
    width = ctx.config.get("width", 64)
    model = nn.Sequential(
        nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, ARMS)
    ).to(ctx.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=ctx.config.get("lr", 3e-3))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=ctx.last_step)
    ctx.register(model=model, optimizer=optimizer, schedule=schedule)

    for step in ctx.steps():
        accuracy = 0.0
        for samples in ctx.batches(len(points)):
            logits = model(points[samples])
            ctx.backward(cross_entropy(logits, arms[samples]))
            correct = (logits.argmax(dim=1) == arms[samples]).float()
            accuracy += correct.mean() / ctx.micro_batches
        ctx.step(clip_grad_norm=1.0, metrics={"accuracy": accuracy})
        schedule.step()
        if step % 100 == 0 and ctx.rank == 0:
            with torch.no_grad():
                total = (model(points).argmax(dim=1) == arms).float().mean()
            print(f"step {step}: {total:.1%} of the points classified correctly", flush=True)


if __name__ == "__main__":
    from holdfast_workers import standalone

    standalone.run([str(Path(__file__).with_name("job.yaml")), *sys.argv[1:]])
