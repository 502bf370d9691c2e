"""A script for torchrun that fails once: `record` writes its error where the launcher reads it."""

import argparse
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main():
    options = argparse.ArgumentParser()
    options.add_argument("--folder", type=Path, default=Path("checkpoints"))
    args = options.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    args.folder.mkdir(parents=True, exist_ok=True)
    mark = args.folder / "failed-once"
    had_failed = mark.exists()
    dist.barrier()
    if rank == 1 and not had_failed:
        mark.touch()
        raise ValueError("the learning rate 12 is too high")
    dist.barrier()
    print(f"rank {rank} has finished", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
