"""Memory checkpoints of a user's program, against PyTorch's checkpoints on a local disk.

    python -m benchmarks.tier --json [--state-mb M] [--rounds N] [--folder DISK]

Two ranks hold a model sharded by FSDP2 and the moments of AdamW. In every round they save by
`dcp.save` and by `dcp.async_save`, to the memory tier and to a folder, and load from both. The
stall is how long a call keeps the training thread, on the slower rank. Both sides get the same
state dict and their default settings, `async_save` a process group of its own; the folder's files
are still in the page cache when they are loaded. The copy at the partner, which the node agent
makes beside training, is not part of it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from threading import Thread
from typing import Any

from benchmarks.conditions import machine, print_json, report

RANKS = 2
DIM = 1024
STATES = 3
"""A parameter, and its two moments."""
TIMEOUT_S = 300.0
WAYS = (
    "tier_save",
    "tier_async_save",
    "tier_load",
    "disk_save",
    "disk_async_save",
    "disk_load",
)


@dataclass(frozen=True)
class TierResult:
    """The last line: medians in seconds; ratios of the disk's time to the tier's."""

    save_ratio: float
    async_save_ratio: float
    save_to_async_save_ratio: float
    """The stall of `async_save` to the disk over that of `save` to the tier."""
    restore_ratio: float
    tier_save_s: float
    tier_async_save_s: float
    tier_load_s: float
    disk_save_s: float
    disk_async_save_s: float
    disk_load_s: float


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    folder = Path(tempfile.mkdtemp(prefix="bench-tier-", dir=options.folder))
    memory = Path(tempfile.mkdtemp(prefix="bench-tier-", dir="/dev/shm"))
    report(f"{options.state_mb} MB on {RANKS} ranks, {options.rounds} rounds; {machine()}")
    try:
        times = measure(options.state_mb, options.rounds, folder, memory)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(memory, ignore_errors=True)
    found = summary(times)
    for way in WAYS:
        report(f"{way}: {', '.join(f'{seconds:.3f}' for seconds in times[way])} s")
    if options.json:
        print_json(found)
    return 0


def summary(times: dict[str, list[float]]) -> TierResult:
    middle = {way: median(seconds) for way, seconds in times.items()}
    return TierResult(
        save_ratio=round(middle["disk_save"] / middle["tier_save"], 2),
        async_save_ratio=round(middle["disk_async_save"] / middle["tier_async_save"], 2),
        save_to_async_save_ratio=round(middle["disk_async_save"] / middle["tier_save"], 2),
        restore_ratio=round(middle["disk_load"] / middle["tier_load"], 2),
        **{f"{way}_s": round(seconds, 4) for way, seconds in middle.items()},
    )


def measure(state_mb: int, rounds: int, folder: Path, memory: Path) -> dict[str, list[float]]:
    """Seconds on the slower rank, by way. The first round, which makes the segment, is left out."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(RANKS)]
    processes = [
        context.Process(
            target=_rank, args=(rank, state_mb, rounds + 1, folder, memory, pipes[rank][1])
        )
        for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    try:
        found = []
        for ours, theirs in pipes:
            theirs.close()
            if not ours.poll(TIMEOUT_S):
                raise TimeoutError(f"the ranks did not end within {TIMEOUT_S:g} s")
            found.append(ours.recv())
        return {
            way: [max(each) for each in zip(*(times[way] for times in found), strict=True)][1:]
            for way in WAYS
        }
    finally:
        for process in processes:
            process.kill()
            process.join()


def _rank(
    rank: int, state_mb: int, rounds: int, folder: Path, memory: Path, results: Connection
) -> None:
    """Runs in a process of its own."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    from holdfast_workers.program_memory.memory_tier import MemoryTier

    torch.set_num_threads(1)
    timeout = timedelta(seconds=TIMEOUT_S)
    store = dist.FileStore(str(memory / "rendezvous"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timeout)
    tier = MemoryTier(_attachment(rank, memory))
    group = tier.group
    state = _state(state_mb)
    times: dict[str, list[float]] = {way: [] for way in WAYS}

    @contextmanager
    def timed(way: str) -> Iterator[None]:
        dist.barrier()
        began = time.perf_counter()
        yield
        times[way].append(time.perf_counter() - began)

    def save_and_load(way: str, place: Callable[[int], dict[str, Any]], step: int) -> None:
        with timed(f"{way}_save"):
            dcp.save(state, **_as_writer(place(step)))
        with timed(f"{way}_async_save"):
            saving: Any = dcp.async_save(state, **_as_writer(place(step + 1)), process_group=group)
        saving.result(TIMEOUT_S)
        with timed(f"{way}_load"):
            dcp.load(state, **_as_reader(place(step + 1)))

    for number in range(1, rounds + 1):
        save_and_load("tier", lambda step: {"storage": tier.at(step)}, 2 * number)
        save_and_load("disk", lambda step: {"checkpoint_id": folder / f"{step}"}, 2 * number)
        dist.barrier()
        if rank == 0:
            for path in folder.iterdir():
                shutil.rmtree(path)
    results.send(times)
    dist.barrier()


def _as_writer(place: dict[str, Any]) -> dict[str, Any]:
    return {"storage_writer": place["storage"]} if "storage" in place else place


def _as_reader(place: dict[str, Any]) -> dict[str, Any]:
    return {"storage_reader": place["storage"]} if "storage" in place else place


def _state(state_mb: int) -> dict[str, Any]:
    from torch import nn, optim
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    layers = max(1, (state_mb << 20) // (STATES * 4 * DIM * DIM))
    model = nn.Sequential(*(nn.Linear(DIM, DIM, bias=False) for _ in range(layers)))
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    of_model, of_optimizer = get_state_dict(model, optim.AdamW(model.parameters(), lr=1e-3))
    return {"model": of_model, "optimizer": of_optimizer}


def _attachment(rank: int, memory: Path) -> Any:
    """As of a program that Holdfast started, on a node of its own."""
    from holdfast_workers.ipc import control_channel
    from holdfast_workers.programs.attachment import Attachment
    from holdfast_workers.progress import beacon
    from holdfast_workers.protocol.messages import Restore, Tier
    from holdfast_workers.protocol.programs import PROGRAM_MESSAGES, ProgramPlace

    node = memory / f"node-{rank}"
    node.mkdir()
    beacon.create(node / "beacon")
    ours, theirs = control_channel.pair()
    segment = str(node / "world" / f"own-{rank}.seg")
    place = ProgramPlace(
        "benchmark", 1, rank, RANKS, str(node / "beacon"), segment, Restore(Tier.INIT, 0)
    )
    control_channel.send(ours, place)

    def drain() -> None:
        while True:
            control_channel.receive(ours, *PROGRAM_MESSAGES)

    Thread(target=drain, daemon=True).start()
    return Attachment(theirs)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state-mb", type=int, default=192, help="of all ranks together")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="on the disk; default: the temporary folder")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
