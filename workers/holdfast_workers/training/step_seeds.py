"""Seeds the random generators of a rank for every step, so that RNG state need not be saved.

The random numbers of a step depend only on the seed, the step and an index: of the samples that a
rank reads, and of the layers or positions that it alone computes. So a rank draws the same numbers
after any restore, from any tier or replica.
"""

from __future__ import annotations

import random

import numpy as np
import torch
import xxhash


def seed_generators(seed: int, step: int, index: int, device: str) -> None:
    """Seed the generators that training on `device` may use from (seed, step, index); ranks with
    the same index draw the same numbers."""
    mixed = xxhash.xxh3_64_intdigest(f"random/{seed}/{step}/{index}".encode()) >> 1
    random.seed(mixed)
    np.random.seed(mixed % (1 << 32))
    torch.default_generator.manual_seed(mixed)
    if device.startswith("cuda"):
        with torch.cuda.device(device):
            torch.cuda.manual_seed(mixed)
