"""Plans the export of a model as a folder of Hugging Face: one plain tar file of its files.

So an export stays one file, and the place of each tensor in it is known before any is read. Equal
exports are equal files.
"""

from __future__ import annotations

import json
import math
import re
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from holdfast_workers.checkpoint.export import (
    ExportPlan,
    NotExportable,
    element,
    exportable_parameters,
    own_name,
    run_metadata,
    safetensors_header,
    whole_entry,
)
from holdfast_workers.checkpoint.manifest import Manifest, SavedTensor
from holdfast_workers.checkpoint.narrowing import Narrowing
from holdfast_workers.models.llama_parameters import hugging_face_name
from holdfast_workers.published.folder_parts import FolderParts
from holdfast_workers.published.weight_files import INDEX, SINGLE
from holdfast_workers.spec import Family
from holdfast_workers.state.layout import StateLayout, TensorEntry

SHARD_BYTES = 5_000_000_000
"""Most bytes of the tensors in a file of weights, unless one tensor is larger."""
_FLOAT32_BYTES = 4


@dataclass(frozen=True)
class _Weight:
    saved: SavedTensor
    name: str
    """Hugging Face's."""
    nbytes: int
    """In the exported folder."""

    @property
    def count(self) -> int:
        return math.prod(self.saved.global_shape)


def plan_folder(
    manifest: Manifest, parts: FolderParts, shard_bytes: int = SHARD_BYTES
) -> ExportPlan:
    """Raises NotExportable, BadCheckpoint, IncompleteCheckpoint, as :func:`plan_export` does."""
    _, item_bytes = element("a weight", parts.dtype)
    weights = [
        _Weight(
            saved,
            _hugging_face_name(name, parts.family),
            item_bytes * math.prod(saved.global_shape),
        )
        for name, saved in sorted(exportable_parameters(manifest).items(), key=_in_model_order)
    ]
    for weight in weights:
        if weight.saved.dtype.removeprefix("torch.") != "float32":
            raise NotExportable(f"{weight.saved.name} is {weight.saved.dtype}, and not float32")
    shards = _shards(weights, shard_bytes)
    tar = _TarLayout()
    for name, content in {**parts.files, **_index(shards)}.items():
        tar.begin(name, len(content))
        tar.write(content)
    places: list[int] = []
    for name, shard in shards.items():
        tensors = [(each.name, parts.dtype, each.saved.global_shape) for each in shard]
        header = safetensors_header(tensors, run_metadata(manifest))
        tar.begin(name, len(header) + sum(each.nbytes for each in shard))
        tar.write(header)
        for weight in shard:
            places.append(tar.end)
            tar.end += weight.nbytes
    tar.close()
    loaded, narrowed = places, tuple[Narrowing, ...]()
    if item_bytes < _FLOAT32_BYTES:
        loaded = _behind(places, weights)
        narrowed = tuple(
            Narrowing(weight.saved.name, parts.dtype, source, target, weight.count)
            for weight, source, target in zip(weights, loaded, places, strict=True)
        )
    entries = [whole_entry(each.saved, at) for each, at in zip(weights, loaded, strict=True)]
    layout = StateLayout(tuple(entries), _end_of(entries))
    return ExportPlan(tar.end, tuple(tar.fixed), layout, narrowed, ".tar", parts.note)


def _behind(places: Sequence[int], weights: Sequence[_Weight]) -> list[int]:
    """Where the tensors are in float32, one behind another, so far behind their `places` that each
    value is read before its bytes are overwritten, if they are narrowed in this order."""
    sizes = (_FLOAT32_BYTES * weight.count for weight in weights)
    begins = list(accumulate(sizes, initial=0))[:-1]
    start = max(place - begin for place, begin in zip(places, begins, strict=True))
    start = -(-start // _FLOAT32_BYTES) * _FLOAT32_BYTES
    return [start + begin for begin in begins]


def _end_of(entries: Sequence[TensorEntry]) -> int:
    return entries[-1].offset + entries[-1].nbytes


def _shards(weights: Sequence[_Weight], shard_bytes: int) -> dict[str, list[_Weight]]:
    """The tensors of each file of weights, in their order."""
    shards: list[list[_Weight]] = [[]]
    nbytes = 0  # of the last shard
    for weight in weights:
        if nbytes + weight.nbytes > shard_bytes and shards[-1]:
            shards.append([])
            nbytes = 0
        shards[-1].append(weight)
        nbytes += weight.nbytes
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    stem, _, kind = SINGLE.partition(".")
    return {
        f"{stem}-{number:05d}-of-{len(shards):05d}.{kind}": shard
        for number, shard in enumerate(shards, 1)
    }


def _index(shards: Mapping[str, Sequence[_Weight]]) -> dict[str, bytes]:
    """The file that says where each tensor is; none for a single file of weights."""
    if len(shards) == 1:
        return {}
    total = sum(weight.nbytes for shard in shards.values() for weight in shard)
    where = {weight.name: file for file, shard in shards.items() for weight in shard}
    document = {"metadata": {"total_size": total}, "weight_map": where}
    return {INDEX: (json.dumps(document, indent=2) + "\n").encode()}


class _TarLayout:
    """Lays files out one behind another in a tar file."""

    def __init__(self) -> None:
        self.fixed: list[tuple[int, bytes]] = []
        self.end = 0

    def begin(self, name: str, nbytes: int) -> None:
        """The next `nbytes` are of this file."""
        self._fill()
        info = tarfile.TarInfo(name)  # of no user, and of no time
        info.size = nbytes
        self.write(info.tobuf(tarfile.GNU_FORMAT))

    def write(self, content: bytes) -> None:
        self.fixed.append((self.end, content))
        self.end += len(content)

    def close(self) -> None:
        self._fill()
        self.write(bytes(2 * tarfile.BLOCKSIZE))

    def _fill(self) -> None:
        self.write(bytes(-self.end % tarfile.BLOCKSIZE))


def _in_model_order(named: tuple[str, SavedTensor]) -> list[str | int]:
    """Blocks by their number."""
    parts = re.split(r"(\d+)", named[0])
    return [int(part) if part.isdecimal() else part for part in parts]


def _hugging_face_name(name: str, family: Family) -> str:
    if family == "transformers":
        return own_name(name)
    try:
        return hugging_face_name(own_name(name))
    except KeyError as error:
        raise NotExportable(f"Hugging Face's Llama has no parameter for {name!r}") from error
