"""A script for torchrun: FSDP2, with checkpoints of torch.distributed.checkpoint.

torchrun --nproc-per-node 2 fsdp2.py --steps 60 --folder checkpoints
"""

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

options = argparse.ArgumentParser()
options.add_argument("--steps", type=int, default=60)
options.add_argument("--every", type=int, default=5, help="steps between two checkpoints")
options.add_argument("--pause", type=float, default=0.0, help="seconds that each step waits")
options.add_argument("--folder", type=Path, default=Path("checkpoints"))
args = options.parse_args()

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (world_size,))
torch.manual_seed(1)
model = torch.nn.Sequential(
    *[torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Dropout(0.1)) for _ in range(3)]
)
for block in model:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(100 + rank)


class Training:
    """Everything that a checkpoint contains, as torch.distributed.checkpoint expects it."""

    step = 0

    def state_dict(self):
        weights, moments = get_state_dict(model, optimizer)
        random = {f"random-{rank}": torch.get_rng_state()}
        return {"model": weights, "optimizer": moments, "step": self.step, **random}

    def load_state_dict(self, state):
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        torch.set_rng_state(state[f"random-{rank}"])
        self.step = state["step"]


training = Training()
complete = sorted(args.folder.glob("step-*/.metadata"), key=lambda path: path.parent.name)
dist.barrier()
if complete:
    dcp.load({"training": training}, checkpoint_id=complete[-1].parent)

while training.step < args.steps:
    training.step += 1
    order = torch.Generator().manual_seed(training.step * world_size + rank)
    batch = torch.randn(8, 32, generator=order)
    loss = (model(batch) - batch.flip(1)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(args.pause)
    if rank == 0:
        print(f"step {training.step} loss {loss.item()}", flush=True)
    if training.step % args.every == 0:
        folder = args.folder / f"step-{training.step:06d}"
        dcp.save({"training": training}, checkpoint_id=folder)

dist.destroy_process_group()
