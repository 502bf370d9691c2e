"""A script with Accelerate's own loop, for torchrun.

torchrun --nproc-per-node 2 accelerate_fit.py --steps 60 --folder checkpoints
"""

import argparse
import time

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed

from holdfast.integrations.accelerate import track

options = argparse.ArgumentParser()
options.add_argument("--steps", type=int, default=60)
options.add_argument("--every", type=int, default=5, help="steps between two checkpoints")
options.add_argument("--pause", type=float, default=0.0, help="seconds that each step waits")
options.add_argument("--folder", default="checkpoints")
args = options.parse_args()

accelerator = Accelerator(
    cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True)
)
set_seed(1)
data = torch.randn(256, 16, generator=torch.Generator().manual_seed(0))
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
set_seed(100, device_specific=True)


def train():
    progress = track(accelerator, args.folder)
    progress.resume()
    while progress.step < args.steps:
        for batch in progress.batches(loader):
            loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(args.pause)
            progress.advance(loss=loss.item())
            if accelerator.is_main_process:
                print(f"step {progress.step} loss {loss.item()}", flush=True)
            if progress.step % args.every == 0 or progress.should_stop:
                progress.save()
            if progress.step == args.steps or progress.should_stop:
                return


train()
accelerator.end_training()
