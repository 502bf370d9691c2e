"""Memory checkpoints of a user's program, against PyTorch's checkpoints on a local disk.

Two ranks hold a model sharded by FSDP2 and the moments of AdamW. In every round they save by
`dcp.save` and by `dcp.async_save`, to the memory tier and to a folder, and load from both. The
stall is how long a call keeps the training thread, on the slower rank. Both sides get the same
state dict and their default settings, `async_save` a process group of its own; the folder's files
are still in the page cache when they are loaded.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.support.programs.tier_worlds import TierWorlds
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.checkpoint_parts.floor import timed
from benchmarks.conditions import report
from holdfast.torch import tier

RANKS = 2
DIM = 1024
STATES = 3
"""A parameter, and its two moments."""
TIMEOUT_S = 60.0
CALLS = ("save", "async_save", "load")


@dataclass(frozen=True)
class TierFigures:
    """The median seconds of each call on the slower rank; `ratio` is the disk's to the tier's."""

    tier_s: dict[str, float]
    disk_s: dict[str, float]
    ratio: dict[str, float]


def measure(state_mb: int, rounds: int, memory: Path, disk: Path) -> TierFigures:
    """Measure a state of `state_mb` in all, without the first round, which makes the segment."""
    found = TierWorlds(memory).run(_save_and_load, RANKS, state_mb, rounds + 1, disk)
    ours, theirs = (
        {call: _median([rank[place, call][1:] for rank in found]) for call in CALLS}
        for place in ("tier", "disk")
    )
    ratios = {call: round(theirs[call] / ours[call], 2) for call in CALLS}
    for call in CALLS:
        report(f"{call}: tier {ours[call]:.3f} s, disk {theirs[call]:.3f} s, {ratios[call]}")
    return TierFigures(_rounded(ours), _rounded(theirs), ratios)


def _rounded(seconds: dict[str, float]) -> dict[str, float]:
    return {call: round(took, 4) for call, took in seconds.items()}


def _median(ranks: list[list[float]]) -> float:
    """Return the median over the rounds of the slower rank's seconds."""
    found: float = median(max(seconds) for seconds in zip(*ranks, strict=True))
    return found


def _save_and_load(
    rank: int, state_mb: int, rounds: int, folder: Path
) -> dict[tuple[str, str], list[float]]:
    """Runs in each rank; seconds by place and call."""
    memory, state = tier(), _state(state_mb)
    times: dict[tuple[str, str], list[float]] = {
        (place, call): [] for place in ("tier", "disk") for call in CALLS
    }

    def at(place: str, step: int, side: str) -> dict[str, Any]:
        if place == "tier":
            return {f"storage_{side}": memory.at(step)}
        return {"checkpoint_id": folder / str(step)}

    def save_async(step: int, place: str, saving: list[Any]) -> None:
        writer = at(place, step, "writer")
        saving.append(dcp.async_save(state, **writer, process_group=memory.group))

    for first in range(1, 2 * rounds, 2):
        for place in ("tier", "disk"):
            saving: list[Any] = []
            save = partial(dcp.save, state, **at(place, first, "writer"))
            times[place, "save"].append(timed(save))
            times[place, "async_save"].append(timed(partial(save_async, first + 1, place, saving)))
            saving[0].result(TIMEOUT_S)
            load = partial(dcp.load, state, **at(place, first + 1, "reader"))
            times[place, "load"].append(timed(load))
        dist.barrier()
        if rank == 0:
            for path in folder.iterdir():
                shutil.rmtree(path)
    return times


def _state(state_mb: int) -> dict[str, Any]:
    layers = max(1, (state_mb << 20) // (STATES * 4 * DIM * DIM))
    model = nn.Sequential(*(nn.Linear(DIM, DIM, bias=False) for _ in range(layers)))
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    of_model, of_optimizer = get_state_dict(model, optim.AdamW(model.parameters(), lr=1e-3))
    return {"model": of_model, "optimizer": of_optimizer}
