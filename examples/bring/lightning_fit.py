"""A script with a Lightning Trainer, for torchrun: nothing in it names Holdfast.

torchrun --nproc-per-node 2 lightning_fit.py --steps 60 --folder checkpoints
"""

import argparse
import os
import time
from pathlib import Path

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint

options = argparse.ArgumentParser()
options.add_argument("--steps", type=int, default=60)
options.add_argument("--every", type=int, default=5, help="steps between two checkpoints")
options.add_argument("--pause", type=float, default=0.0, help="seconds that each step waits")
options.add_argument("--folder", type=Path, default=Path("checkpoints"))
args = options.parse_args()


class Batches:
    """A loader with `state_dict`: Lightning then saves its position with the checkpoint."""

    def __init__(self, rank, world_size):
        self.rank, self.world_size, self.epoch, self.position = rank, world_size, 0, 0
        self.data = torch.randn(256, 16, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return 256 // 8 // self.world_size

    def __iter__(self):
        order = torch.randperm(256, generator=torch.Generator().manual_seed(self.epoch))
        while self.position < len(self):
            at = (self.position * self.world_size + self.rank) * 8
            self.position += 1
            yield self.data[order[at : at + 8]]
        self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self):
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state):
        self.epoch, self.position = state["epoch"], state["position"]


class Regression(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(16, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1)
        )

    def training_step(self, batch, index):
        time.sleep(args.pause)
        loss = (self.net(batch) - batch.sum(1, keepdim=True)).square().mean()
        if self.global_rank == 0:
            print(f"step {self.global_step + 1} loss {loss.item()}", flush=True)
        return loss

    def train_dataloader(self):
        return Batches(self.trainer.global_rank, self.trainer.world_size)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


pl.seed_everything(1)
ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
trainer = pl.Trainer(
    accelerator="cpu",
    strategy="ddp",
    devices=ranks_per_node,
    num_nodes=int(os.environ.get("WORLD_SIZE", "1")) // ranks_per_node,
    max_steps=args.steps,
    callbacks=[ModelCheckpoint(args.folder, every_n_train_steps=args.every, save_last=True)],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Regression(), ckpt_path="last")
