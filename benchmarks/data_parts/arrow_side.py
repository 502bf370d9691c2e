"""The peer `torch.utils.data.DataLoader` over a data set of the library `datasets`, in Arrow files.

Imports nothing of Holdfast.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from pathlib import Path

import numpy as np
from datasets import Dataset, Features, Sequence, Value, load_from_disk
from numpy.typing import NDArray
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from benchmarks.data_parts.read_loop import Batch
from benchmarks.data_parts.windows import COLUMN, as_batch, of_rows, read_windows

_FOLDER = "arrow"
_ROWS_AT_ONCE = 1024
SETTINGS = ("rows, 2 workers", "batches, 0 workers", "batches, 1 worker", "batches, 2 workers")
"""A loader that fetches rows and joins them, as is usual, or one that fetches whole batches by
lists of their rows."""


def write(folder: Path) -> None:
    """Write the data set of the folder's windows."""
    windows = read_windows(folder)

    def rows() -> Iterator[dict[str, NDArray[np.uint16]]]:
        for row in windows:
            yield {COLUMN: np.array(row)}

    kind = Sequence(Value("uint16"), length=windows.shape[1])
    made = Dataset.from_generator(
        rows,
        Features({COLUMN: kind}),
        cache_dir=str(folder / "cache"),
        writer_batch_size=_ROWS_AT_ONCE,
    )
    made.save_to_disk(folder / _FOLDER)


def epochs(folder: Path, batch: int, setting: str) -> Iterator[Iterator[Batch]]:
    """The batches of each epoch, which are shuffled."""
    fetched, _, workers = setting.partition(", ")
    data = load_from_disk(folder / _FOLDER).with_format("numpy")
    count = int(workers[0])
    if fetched == "rows":
        loader = DataLoader(
            data,
            batch_size=batch,
            shuffle=True,
            num_workers=count,
            persistent_workers=count > 0,
            collate_fn=of_rows,
        )
    else:
        loader = DataLoader(
            data,
            sampler=BatchSampler(RandomSampler(data), batch, drop_last=False),
            batch_size=None,
            num_workers=count,
            persistent_workers=count > 0,
            collate_fn=_of_columns,
        )
    return map(iter, repeat(loader))


def _of_columns(columns: dict[str, NDArray[np.integer]]) -> Batch:
    return as_batch(columns[COLUMN])
