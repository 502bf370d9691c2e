"""The random generators of a rank: seeded anew for every step, so that they are no state to keep.

What a step draws follows from the seed, the step and the data index. So a rank draws the same
after any restore, whatever tier or replica its state came from, and on any mesh.
"""

from __future__ import annotations

import torch
import xxhash


def seed_generators(seed: int, step: int, index: int, device: str) -> None:
    """Seed those that training on `device` may draw from as a function of (seed, step, index);
    ranks of one data index draw the same numbers."""
    mixed = xxhash.xxh3_64_intdigest(f"random/{seed}/{step}/{index}".encode()) >> 1
    torch.default_generator.manual_seed(mixed)
    if device.startswith("cuda"):
        with torch.cuda.device(device):
            torch.cuda.manual_seed(mixed)
