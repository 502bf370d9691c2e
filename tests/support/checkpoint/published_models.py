"""Folders of published models, written by hand, by the format's own library, or by transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from holdfast_workers.checkpoint.local_files import LocalStorage
from holdfast_workers.checkpoint.storage import write_small
from holdfast_workers.published.folder import published_shapes, read_folder
from holdfast_workers.published.model_config import read_config
from holdfast_workers.published.weight_set import (
    CHUNK_BYTES,
    MANIFEST,
    OTHERS,
    WeightSet,
    digest_file,
)
from holdfast_workers.spec import Family, ModelSpec, PublishedSpec

SMALL_CHUNKS = 1 << 10
TINY: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 300,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
"""A config.json."""
_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int8: "I8"}


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], pad: int | None = None) -> None:
    """`pad`: spaces behind the header; None: up to a multiple of eight bytes, as usual."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors.items():
        end = at + tensor.numel() * tensor.element_size()
        shape = list(tensor.shape)
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": shape, "data_offsets": [at, end]}
        at = end
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8 if pad is None else pad)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for tensor in tensors.values():
            file.write(bytes_of(tensor))


def bytes_of(tensor: Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def tensors_of(config: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Random weights, by their published names."""
    random = torch.Generator().manual_seed(3)
    shapes = published_shapes(ModelSpec(**read_config(config).fields))
    return {
        name: torch.randn(shape, generator=random).to(dtype) / 8 for name, shape in shapes.items()
    }


def write_folder(
    folder: Path,
    config: Mapping[str, Any] = TINY,
    tensors: Mapping[str, Tensor] | None = None,
    parts: int = 1,
) -> dict[str, Tensor]:
    """A whole folder, whose weights are in so many files. Returns the tensors."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    found = dict(tensors_of(config) if tensors is None else tensors)
    if parts == 1:
        write_safetensors(folder / "model.safetensors", found)
        return found
    names, index = list(found), {}
    for part in range(parts):
        file = part_name(part, parts)
        own = {name: found[name] for name in names[part::parts]}
        write_safetensors(folder / file, own)
        index.update(dict.fromkeys(own, file))
    write_index(folder, index)
    return found


def part_name(part: int, parts: int) -> str:
    return f"model-{part + 1:05d}-of-{parts:05d}.safetensors"


def write_index(folder: Path, weight_map: Mapping[str, Any]) -> None:
    document = {"metadata": {"total_size": 1}, "weight_map": dict(weight_map)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(document))


def weight_set_of(
    folder: Path, chunk_bytes: int = CHUNK_BYTES, family: Family = "llama"
) -> WeightSet:
    found = read_folder(folder, family)
    digests = {
        name: digest_file(folder / name, lambda _: None, chunk_bytes)
        for name in (*(name for name, _ in found.files), *found.others)
    }
    return WeightSet(
        found.document,
        tuple(digests[name] for name, _ in found.files),
        tuple(found.tensors.values()),
        tuple(digests[name] for name in found.others),
        chunk_bytes,
    )


def prepared_model(
    folder: Path,
    store: Path,
    chunk_bytes: int = SMALL_CHUNKS,
    family: Family = "llama",
    **changes: Any,
) -> ModelSpec:
    """The section `model` of a job that begins with a folder's weights, as a server prepares it;
    manifest and small files are in the store."""
    found, weights = read_folder(folder, family), weight_set_of(folder, chunk_bytes, family)
    for file in weights.others:
        content = (folder / file.name).read_bytes()
        write_small(LocalStorage(store), f"{OTHERS}/{file.name}", content)
    write_small(LocalStorage(store), MANIFEST, weights.encode())
    published = PublishedSpec(
        uri=str(store),
        digest=weights.digest,
        manifest_bytes=len(weights.encode()),
        nbytes=sum(nbytes for _, nbytes in found.files),
        dtype=found.dtype,
        positions=found.config.positions,
        config=dict(found.document) if family == "transformers" else None,
    )
    fields = {"family": family, "sequence_length": 32, **found.config.fields, **changes}
    return ModelSpec.model_validate({"from": str(folder), "published": published, **fields})


def loaded(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder, as the format's own library reads them."""
    from safetensors.torch import load_file

    return dict(_loaded(folder, load_file))


def _loaded(folder: Path, load_file: Any) -> Iterator[tuple[str, Tensor]]:
    for path in sorted(folder.glob("*.safetensors")):
        yield from load_file(path).items()
