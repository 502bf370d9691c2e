"""Turns float32 values of an exported file into bfloat16 or float16, in their file. No torch.

The nearest value is taken, of two the even one, as torch does. A value that came from the narrower
type gets its own bytes again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from mmap import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

_AT_ONCE = 1 << 20
"""Values that are in memory at once."""


@dataclass(frozen=True)
class Narrowing:
    """A tensor of float32 at one offset of a file, to be narrowed to another."""

    name: str
    dtype: str
    """bfloat16 or float16."""
    source: int
    target: int
    """At most `source`, so that no value is overwritten before it is read."""
    count: int


def narrow(mapped: mmap, tensor: Narrowing) -> Iterator[None]:
    """Narrow a tensor of a mapped file; yields after each few megabytes. Raises as
    :func:`narrowed_values`."""
    for start in range(0, tensor.count, _AT_ONCE):
        count = min(_AT_ONCE, tensor.count - start)
        wide = np.frombuffer(mapped, np.float32, count, tensor.source + 4 * start)
        target = tensor.target + 2 * start
        mapped[target : target + 2 * count] = narrowed_values(wide, tensor.dtype).tobytes()
        yield


def narrowed_values(wide: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """The bits of each value in the other dtype (uint16). Raises FloatingPointError if a finite
    value becomes infinite."""
    if dtype == "float16":
        with np.errstate(over="raise", under="ignore"):
            return wide.astype(np.float16).view(np.uint16)
    bits = wide.view(np.uint32)
    even = (bits >> np.uint32(16)) & np.uint32(1)
    nearest = (bits + np.uint32(0x7FFF) + even) >> np.uint32(16)
    finite = np.isfinite(wide)
    if bool((finite & ((nearest & np.uint32(0x7FFF)) == 0x7F80)).any()):
        raise FloatingPointError("overflow encountered")
    # Rounding would turn some that are no number into other bits; a 1 at the end keeps them so.
    kept = (bits >> np.uint32(16)) | ((bits & np.uint32(0xFFFF)) != 0)
    return np.where(np.isnan(wide), kept, nearest).astype(np.uint16)
