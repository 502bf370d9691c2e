"""The random generators of a rank as part of its state."""

from __future__ import annotations

import torch
import xxhash

from holdfast_workers.state import RankBytes


def generators(device: str) -> list[RankBytes]:
    """The generators that training on `device` may draw from, CPU first."""
    found = [RankBytes("random.cpu", torch.get_rng_state, torch.set_rng_state)]
    if device.startswith("cuda"):
        found.append(
            RankBytes(
                "random.cuda",
                lambda: torch.cuda.get_rng_state(device),
                lambda state: torch.cuda.set_rng_state(state, device),
            )
        )
    return found


def seed_generators(seed: int, index: int, device: str) -> None:
    """Seed them as a function of (seed, index); ranks of one index draw the same numbers."""
    mixed = xxhash.xxh3_64_intdigest(f"random/{seed}/{index}".encode()) >> 1
    torch.default_generator.manual_seed(mixed)
    if device.startswith("cuda"):
        with torch.cuda.device(device):
            torch.cuda.manual_seed(mixed)
