"""A script for torchrun: DistributedDataParallel, with a checkpoint file of its own.

torchrun --nproc-per-node 2 ddp.py --steps 60 --folder checkpoints
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

options = argparse.ArgumentParser()
options.add_argument("--steps", type=int, default=60)
options.add_argument("--every", type=int, default=5, help="steps between two checkpoints")
options.add_argument("--pause", type=float, default=0.0, help="seconds that each step waits")
options.add_argument("--folder", type=Path, default=Path("checkpoints"))
args = options.parse_args()

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1))
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(100 + rank)
start = 0

args.folder.mkdir(parents=True, exist_ok=True)
file = args.folder / "newest.pt"
if file.exists():
    saved = torch.load(file)
    net.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    torch.set_rng_state(saved["random"][rank])
    start = saved["step"]


def save(step: int) -> None:
    random = [torch.empty_like(torch.get_rng_state()) for _ in range(world_size)]
    dist.all_gather(random, torch.get_rng_state())
    if rank == 0:
        state = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "random": random, "step": step}, file.with_suffix(".new"))
        file.with_suffix(".new").rename(file)


for step in range(start + 1, args.steps + 1):
    order = torch.Generator().manual_seed(step * world_size + rank)
    batch = torch.randn(8, 16, generator=order)
    loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(args.pause)
    if rank == 0:
        print(f"step {step} loss {loss.item()}", flush=True)
    if step % args.every == 0:
        save(step)

dist.destroy_process_group()
print(f"rank {rank} of {world_size} has finished, local rank {os.environ['LOCAL_RANK']}")
