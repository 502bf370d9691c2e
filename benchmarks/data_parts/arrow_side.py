"""The peer `torch.utils.data.DataLoader` over a data set of the library `datasets`, in Arrow files.

Imports nothing of Holdfast.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, Features, Sequence, Value, load_from_disk
from numpy.typing import NDArray
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from benchmarks.data_parts.read_loop import Batch
from benchmarks.data_parts.windows import COLUMN, as_batch, of_rows, read_windows

_FOLDER = "arrow"
_ROWS_AT_ONCE = 1024


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
    """The batches of each epoch, which are shuffled.

    Setting "rows": the loader fetches rows and joins them, as is usual; "batches": it fetches whole
    batches, by lists of their rows. With the number of its workers.
    """
    fetched, _, workers = setting.partition(", ")
    data = load_from_disk(folder / _FOLDER).with_format("numpy")
    how: dict[str, Any] = {"batch_size": batch, "shuffle": True, "collate_fn": of_rows}
    if fetched == "batches":
        of_batches = BatchSampler(RandomSampler(data), batch, drop_last=False)
        how = {"batch_size": None, "sampler": of_batches, "collate_fn": _of_columns}
    count = int(workers[0])
    loader = DataLoader(data, num_workers=count, persistent_workers=count > 0, **how)
    return map(iter, repeat(loader))


def _of_columns(columns: dict[str, NDArray[np.integer]]) -> Batch:
    return as_batch(columns[COLUMN])
