"""A Ray Train function as Ray's guide writes it: it names nothing of Holdfast.

`steps_folder` is the benchmark's: every rank writes its steps there.
"""

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch
import torch
from ray.train import Checkpoint


def train_loop_per_worker(config: dict[str, Any]) -> None:
    born = time.time()
    rank, width = ray.train.get_context().get_world_rank(), config["width"]
    torch.manual_seed(0)
    layers = (torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.Linear(width, 1))
    model = ray.train.torch.prepare_model(torch.nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters())
    first = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder) / "state.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]

    path = Path(config["steps_folder"]) / f"{rank}-{os.getpid()}.jsonl"
    with path.open("w", buffering=1) as out:
        header = {"rank": rank, "pid": os.getpid(), "born": born, "built": time.time()}
        print(json.dumps(header), file=out)
        for step in range(first + 1, config["steps"] + 1):
            generator = torch.Generator().manual_seed(step * 2 + rank)
            inputs = torch.randn(64, width, generator=generator)
            loss = (model(inputs) - inputs.mean(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(json.dumps({"step": step, "at": time.time()}), file=out)
            if step % config["every"] == 0:
                _report(rank, model, optimizer, step, loss.item())


def _report(
    rank: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int, loss: float
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "step": step}, Path(folder) / "state.pt")
            checkpoint = Checkpoint.from_directory(folder)
        ray.train.report({"loss": loss, "training_step": step}, checkpoint=checkpoint)
