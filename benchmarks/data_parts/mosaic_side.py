"""The peer `mosaicml-streaming`: its data set over MDS shards, and its loader.

Imports nothing of Holdfast; an interpreter with `streaming` runs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.data_parts.read_loop import Batch
from benchmarks.data_parts.windows import COLUMN, of_rows, read_windows

# torchvision, which `streaming` imports, has no operators for the pinned torch without CUDA, and
# fails where they are not declared.
_OPERATORS: Any = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
for _name in ("nms", "qnms"):
    _OPERATORS.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from streaming import (  # type: ignore[import-not-found]  # noqa: E402
    MDSWriter,
    StreamingDataLoader,
    StreamingDataset,
)

_FOLDER = "mds"


def write(folder: Path) -> None:
    """Write the shards of the folder's windows."""
    windows = read_windows(folder)
    columns = {COLUMN: f"ndarray:uint16:{windows.shape[1]}"}
    with MDSWriter(out=str(folder / _FOLDER), columns=columns) as out:
        for row in windows:
            out.write({COLUMN: np.array(row)})


def epochs(folder: Path, batch: int, setting: str) -> Iterator[Iterator[Batch]]:
    """The batches of each epoch, which are shuffled. The setting is the number of workers."""
    workers = int(setting[0])
    data = StreamingDataset(local=str(folder / _FOLDER), shuffle=True, batch_size=batch)
    loader = StreamingDataLoader(
        data,
        batch_size=batch,
        num_workers=workers,
        persistent_workers=workers > 0,
        collate_fn=of_rows,
    )
    return map(iter, repeat(loader))
