"""torchft's side of `benchmarks.storm`, run by an interpreter with torchft; imports no Holdfast.

    python torchft_program.py storm LOG STEP_S CALM_S STORM_S TIMEOUT_S SEED RANKS MTBF_S...

keeps RANKS replicas alive and restarts each at once when it dies. Once all take part, it kills none
for CALM_S, then kills random replicas at exponential intervals, for STORM_S at each mean. The
replicas record their commits in LOG. The last line of output is JSON: replica-steps committed per
second during the calm and during each storm, with the number of kills.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

WARM_S = 20.0
POLL_S = 0.02
NEVER_S = 1e9


def main() -> None:
    command, *arguments = sys.argv[1:]
    if command == "storm":
        log, step_s, calm_s, storm_s, timeout_s, seed, ranks, *rates = arguments
        times = map(float, (step_s, calm_s, storm_s, timeout_s))
        storms(Path(log), *times, rates=[*map(float, rates)], seed=int(seed), ranks=int(ranks))
    else:
        replica(arguments[0], Path(arguments[1]), *map(float, arguments[2:]))


def storms(
    log: Path,
    step_s: float,
    calm_s: float,
    storm_s: float,
    timeout_s: float,
    *,
    rates: list[float],
    seed: int,
    ranks: int,
) -> None:
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind="[::]:0",
        min_replicas=1,
        join_timeout_ms=100,
        heartbeat_timeout_ms=1000,
        quorum_tick_ms=50,
    )
    log.touch()
    environment = {
        **os.environ,
        "TORCHFT_LIGHTHOUSE": lighthouse.address(),
        "OMP_NUM_THREADS": "1",
    }

    def start(rank: int) -> subprocess.Popen[bytes]:
        arguments = ["replica", str(rank), str(log), str(step_s), str(timeout_s)]
        quiet = subprocess.DEVNULL
        return subprocess.Popen(
            [sys.executable, __file__, *arguments], env=environment, stdout=quiet, stderr=quiet
        )

    replicas = [start(rank) for rank in range(ranks)]
    rng = random.Random(seed)
    calm_from = time.time() + WARM_S

    def restart_and_kill(until: float, mtbf_s: float) -> int:
        """Restart dead replicas and kill random ones; returns the number of kills."""
        kills, due = 0, time.time() + rng.expovariate(1.0 / mtbf_s)
        while (now := time.time()) < until:
            for rank, process in enumerate(replicas):
                if process.poll() is not None:
                    replicas[rank] = start(rank)
            if now >= due:
                replicas[rng.randrange(ranks)].kill()
                kills += 1
                due += rng.expovariate(1.0 / mtbf_s)
            time.sleep(POLL_S)
        return kills

    begins = [calm_from + calm_s + index * storm_s for index in range(len(rates))]
    try:
        restart_and_kill(begins[0], NEVER_S)
        kills = [
            restart_and_kill(at + storm_s, rate) for at, rate in zip(begins, rates, strict=True)
        ]
    finally:
        for process in replicas:
            process.kill()
            process.wait()
    commits = [float(line) for line in log.read_text().splitlines()]
    figures = [
        {"per_s": sum(begin <= at < begin + storm_s for at in commits) / storm_s, "kills": count}
        for begin, count in zip(begins, kills, strict=True)
    ]
    calm = sum(calm_from <= at < begins[0] for at in commits) / calm_s
    print(json.dumps({"calm_per_s": calm, "storms": figures}), flush=True)
    os._exit(0)  # the lighthouse's threads never end


def replica(rank: str, log: Path, step_s: float, timeout_s: float) -> None:
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
    main()
