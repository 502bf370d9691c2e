"""A script that trains in the steps of Holdfast: FSDP2, with exactly the same bits after a fault.

holdfast run --local --nproc-per-node 2 --set program.context=true -- context.py
"""

import argparse
import time

import torch
from torch import nn
from torch.nn.functional import mse_loss

import holdfast

options = argparse.ArgumentParser()
options.add_argument("--lr", type=float, default=1e-2)
options.add_argument("--pause", type=float, default=0.0, help="seconds that each step waits")
args = options.parse_args()

ctx = holdfast.attach().context
x = torch.randn(512, 16, generator=torch.Generator().manual_seed(1))
y = x.sum(1, keepdim=True)

model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.1), nn.Linear(32, 1))
ctx.shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
ctx.register(model=model, optimizer=optimizer)

for step in ctx.steps():
    for samples in ctx.batches(len(x)):
        ctx.backward(mse_loss(model(x[samples]), y[samples]))
    ctx.step()
    time.sleep(args.pause)
    if step % 20 == 0 and ctx.rank == 0:
        print(f"step {step} of {ctx.last_step}", flush=True)

print(f"rank {ctx.rank} of {ctx.world_size} has finished, attempt {ctx.attempt}")
