"""Loads a model that stock `torch.distributed.checkpoint` saved, by stock's own reader.

Stock's `.metadata` is a pickle, and unpickling executes arbitrary code: it is read only from a
folder that a job's user has named. Only the model's weights are loaded, by Holdfast's names. The
names may lack the module's own (`model.`) if the job has one module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from holdfast_workers.checkpoint.manifest import CheckpointError, IncompatibleCheckpoint, listed
from holdfast_workers.checkpoint.stock import torch_dtype
from holdfast_workers.state.layout import StateLayout, TensorEntry, module_of, module_prefix

_AT_ONCE = 256 * 1024 * 1024
_OTHER_STATE = "optim"
"""Prefix of names that do not belong to the model."""
_LISTED = 5


class UnreadableStockCheckpoint(CheckpointError):
    """Stock torch cannot read the checkpoint."""


def load_stock_model(folder: str, layout: StateLayout, payload: memoryview) -> None:
    """Fill the entries of `layout`, which are the weights, in `payload`.

    Whole tensors are read, some 256 MB at a time, and cut to this rank's boxes; dtypes are
    converted. Raises IncompatibleCheckpoint with the names that are missing, unexpected or of
    another shape, UnreadableStockCheckpoint if no such checkpoint can be read.
    """
    try:
        sizes = _sizes(FileSystemReader(folder).read_metadata().state_dict_metadata)
        names = _matched(folder, layout.tensors, sizes)
        for batch in _batches(layout.tensors):
            whole = {
                names[entry.name]: torch.empty(entry.global_shape, dtype=torch_dtype(entry.dtype))
                for entry in batch
            }
            load(dict(whole), storage_reader=FileSystemReader(folder), no_dist=True)
            for entry in batch:
                _take_box(whole[names[entry.name]], entry, payload)
    except CheckpointError:
        raise
    except Exception as error:  # a pickle, a reader or a file system may raise anything
        raise UnreadableStockCheckpoint(
            f"stock torch cannot read {folder}: {type(error).__name__}: {error}"
        ) from error


def _sizes(metadata: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {
        name: tuple(entry.size)
        for name, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def _matched(
    folder: str, entries: Sequence[TensorEntry], sizes: Mapping[str, tuple[int, ...]]
) -> dict[str, str]:
    """The checkpoint's name for each entry. Raises IncompatibleCheckpoint."""
    prefix = module_prefix(entry.name for entry in entries)
    prefixed = not prefix or any(entry.name in sizes for entry in entries)
    names = {entry.name: entry.name.removeprefix("" if prefixed else prefix) for entry in entries}
    modules = {module_of(entry.name) for entry in entries}
    candidates = {
        name
        for name in sizes
        if (module_of(name) in modules if prefixed else not name.startswith(_OTHER_STATE))
    }
    faults = []
    if missing := [name for name in names.values() if name not in sizes]:
        faults.append(f"missing: {listed(missing)}")
    if unexpected := sorted(candidates - set(names.values())):
        faults.append(f"unexpected: {listed(unexpected)}")
    faults += [
        f"{names[entry.name]} has the shape {sizes[names[entry.name]]} there, "
        f"{entry.global_shape} here"
        for entry in entries
        if sizes.get(names[entry.name], entry.global_shape) != entry.global_shape
    ][:_LISTED]
    if faults:
        raise IncompatibleCheckpoint(f"{folder} is of another model; {'; '.join(faults)}")
    return names


def _batches(entries: Sequence[TensorEntry]) -> Iterator[list[TensorEntry]]:
    batch: list[TensorEntry] = []
    nbytes = 0
    for entry in entries:
        size = torch.Size(entry.global_shape).numel() * torch_dtype(entry.dtype).itemsize
        if batch and nbytes + size > _AT_ONCE:
            yield batch
            batch, nbytes = [], 0
        batch.append(entry)
        nbytes += size
    if batch:
        yield batch


def _take_box(whole: torch.Tensor, entry: TensorEntry, payload: memoryview) -> None:
    if not entry.nbytes:
        return
    sides = zip(entry.offsets, entry.shape, strict=True)
    box = whole[tuple(slice(start, start + length) for start, length in sides)]
    target = torch.frombuffer(
        payload[entry.offset : entry.offset + entry.nbytes], dtype=torch_dtype(entry.dtype)
    )
    target.view(entry.shape).copy_(box)
