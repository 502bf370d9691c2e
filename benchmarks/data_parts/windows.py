"""Windows of token ids, as the peers store them: (windows, sequence_length + 1) of uint16.

Imports nothing of Holdfast.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.data_parts.read_loop import Batch

COLUMN = "tokens"
FILE = "windows.npy"


def read_windows(folder: Path) -> NDArray[np.uint16]:
    found: NDArray[np.uint16] = np.load(folder / FILE, mmap_mode="r")
    return found


def as_batch(rows: NDArray[np.integer] | Sequence[NDArray[np.integer]]) -> Batch:
    """The inputs and targets of some windows, as `TokenCorpus.batch` makes them."""
    tokens = torch.from_numpy(np.asarray(rows).astype(np.int64))
    return tokens[:, :-1], tokens[:, 1:]


def of_rows(rows: Sequence[dict[str, NDArray[np.integer]]]) -> Batch:
    """`collate_fn` of a loader that fetches rows."""
    return as_batch(np.stack([row[COLUMN] for row in rows]))
