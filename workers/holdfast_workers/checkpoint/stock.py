"""The interface to stock `torch.distributed.checkpoint`: names, dtypes and its `.metadata`.

Other programs read a checkpoint through `.metadata`, a pickle that Holdfast writes and never
reads. A tensor has the entry's name there; a per-rank entry has its rank appended, because every
rank has an entry of that name. A rank's own values of a weight (running statistics) stand beside
the model, not in it: a program that loads all names of the model finds those of one rank.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from holdfast_workers.checkpoint.manifest import Manifest, SavedTensor
from holdfast_workers.checkpoint.storage import Storage, write_small

STOCK_METADATA = ".metadata"


def stock_name(tensor: SavedTensor) -> str:
    if not tensor.per_rank:
        return tensor.name
    if tensor.weight:
        return f"holdfast.rank{tensor.rank}.{tensor.name}"
    return f"{tensor.name}.rank{tensor.rank}"


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of a name such as `float32` or `torch.float32`. Raises ValueError."""
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype of torch")
    return dtype


def write_stock_metadata(checkpoint: Storage, manifest: Manifest) -> None:
    """Write `.metadata` beside the shards; durable on return."""
    tensors: dict[str, TensorStorageMetadata] = {}
    places: dict[MetadataIndex, Any] = {}
    for saved in manifest.tensors:
        name = stock_name(saved)
        shape = saved.shape if saved.per_rank else saved.global_shape
        offsets = torch.Size([0] * len(shape) if saved.per_rank else saved.offsets)
        if name not in tensors:
            properties = TensorProperties(dtype=torch_dtype(saved.dtype))
            tensors[name] = TensorStorageMetadata(properties, torch.Size(shape), [])
        chunks = tensors[name].chunks
        index = MetadataIndex(name, offsets, len(chunks))
        chunks.append(ChunkStorageMetadata(offsets, torch.Size(saved.shape)))
        places[index] = _StorageInfo(saved.file, saved.offset, saved.length)
    metadata = Metadata(state_dict_metadata=dict(tensors), storage_data=places)
    write_small(checkpoint, STOCK_METADATA, pickle.dumps(metadata))
