"""The processes of torchft in `benchmarks.storm`, run by an interpreter with torchft; imports no
Holdfast.

    python torchft_program.py lighthouse FILE              # gets the address
    python torchft_program.py replica LOG STEP_S TIMEOUT_S RANK
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path


def lighthouse(address: Path) -> None:
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind="[::]:0",
        min_replicas=1,
        join_timeout_ms=100,
        heartbeat_timeout_ms=1000,
        quorum_tick_ms=50,
    )
    fresh = address.with_suffix(".new")
    fresh.write_text(server.address())
    fresh.replace(address)
    while True:
        time.sleep(60)  # until it is killed


def replica(log: Path, step_s: float, timeout_s: float, rank: str) -> None:
    """Train until killed; writes the time of each committed step as a line."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
    from torchft.checkpointing.pg_transport import PGTransport

    torch.set_num_threads(1)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", str(store.port)
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])
    optimizer = torch.optim.AdamW(model.parameters())

    def load(state: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    limit = timedelta(seconds=timeout_s)
    group = ProcessGroupGloo(timeout=limit)
    manager = Manager(
        pg=group,
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        world_size=1,
        rank=0,
        replica_id=f"replica{rank}_",
        timeout=limit,
        quorum_timeout=timedelta(seconds=60),
        connect_timeout=timedelta(seconds=10),
        checkpoint_transport=PGTransport(group, timeout=limit, device=torch.device("cpu")),
    )
    parallel, managed = DistributedDataParallel(manager, model), Optimizer(manager, optimizer)
    with log.open("a", buffering=1) as commits:
        while True:
            managed.zero_grad()
            time.sleep(step_s)
            parallel(torch.randn(16, 256)).square().mean().backward()
            before = manager.current_step()
            managed.step()
            if manager.current_step() > before:
                commits.write(f"{time.time()}\n")


if __name__ == "__main__":
    if sys.argv[1] == "lighthouse":
        lighthouse(Path(sys.argv[2]))
    else:
        log, step_s, timeout_s, rank = sys.argv[2:]
        replica(Path(log), float(step_s), float(timeout_s), rank)
