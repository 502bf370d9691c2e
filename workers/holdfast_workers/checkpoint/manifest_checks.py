"""What a manifest promises, compared with itself and with the sizes of the files.

Before a checkpoint is published, and before anything is allocated for one whose manifest somebody
else may have written. The bytes are verified later, by their digests.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from holdfast_workers.checkpoint.boxes import tiling_fault
from holdfast_workers.checkpoint.manifest import (
    MANIFEST,
    BadCheckpoint,
    IncompleteCheckpoint,
    Manifest,
    SavedTensor,
)
from holdfast_workers.checkpoint.storage import joined


def check_tiling(uri: str, tensors: Iterable[SavedTensor]) -> None:
    """Raises IncompleteCheckpoint unless the boxes of each tensor tile it: no gap, no overlap."""
    boxes: dict[str, list[SavedTensor]] = defaultdict(list)
    for tensor in tensors:
        boxes[tensor.name].append(tensor)
    for name, parts in boxes.items():
        kinds = {(part.dtype, part.global_shape) for part in parts}
        if len(kinds) != 1:
            raise IncompleteCheckpoint(f"{name}: ranks differ in dtype or shape: {sorted(kinds)}")
        fault = tiling_fault((part.box for part in parts), parts[0].global_shape)
        if fault is not None:
            raise IncompleteCheckpoint(f"{uri}: {name}: {fault}")


def check_bytes(manifest: Manifest, tensors: Iterable[SavedTensor]) -> None:
    """Raises BadCheckpoint if a file is to hold more bytes of tensors than it has."""
    taken: Counter[str] = Counter()
    for tensor in tensors:
        taken[tensor.file] += tensor.nbytes
    for file in manifest.files:
        if taken[file.name] > file.nbytes:
            raise BadCheckpoint(
                joined(manifest.uri, MANIFEST),
                f"{file.name} has {file.nbytes} bytes, and tensors of {taken[file.name]} bytes "
                "together",
            )


def check_sizes(manifest: Manifest, sizes: Mapping[str, int]) -> None:
    """Raises BadCheckpoint unless each file has the size that the manifest says. `sizes`: of the
    objects in the checkpoint's folder."""
    for file in manifest.files:
        size, uri = sizes.get(file.name), joined(manifest.uri, file.name)
        if size is None:
            raise BadCheckpoint(uri, "missing")
        if size != file.nbytes:
            raise BadCheckpoint(uri, f"{size} bytes, the manifest says {file.nbytes}")
