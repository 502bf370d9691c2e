"""A training script as users of torchrun write it: DDP, and a checkpoint file of its own.

It names nothing of Holdfast. `--steps-folder` is the benchmark's: ranks write their steps there.
"""

import argparse
import json
import os
import time
from pathlib import Path

BORN = time.time()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--steps-folder", type=Path, required=True)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    layers = (torch.nn.Linear(options.width, options.width), torch.nn.GELU())
    model = DistributedDataParallel(torch.nn.Sequential(*layers, torch.nn.Linear(options.width, 1)))
    optimizer = torch.optim.AdamW(model.parameters())
    first = 0
    if options.checkpoint.exists():
        state = torch.load(options.checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]

    with (options.steps_folder / f"{rank}-{os.getpid()}.jsonl").open("w", buffering=1) as out:
        header = {"rank": rank, "pid": os.getpid(), "born": BORN, "built": time.time()}
        print(json.dumps(header), file=out)
        for step in range(first + 1, options.steps + 1):
            generator = torch.Generator().manual_seed(step * dist.get_world_size() + rank)
            inputs = torch.randn(64, options.width, generator=generator)
            loss = (model(inputs) - inputs.mean(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(json.dumps({"step": step, "at": time.time()}), file=out)
            if step % options.every == 0 and rank == 0:
                new = options.checkpoint.with_suffix(".new")
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**state, "step": step}, new)
                new.replace(options.checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
