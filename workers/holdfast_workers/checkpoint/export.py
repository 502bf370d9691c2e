"""Exports a checkpoint's model weights, whole, to one file: plain safetensors, or as planned.

The export runs in bounded memory and reads the checkpoint's files in one pass. Each file must have
the sha256 of the manifest, so the exported file consists of verified bytes only. The format is 8
bytes of length, a JSON header of that length, and the tensors without a gap
(https://github.com/huggingface/safetensors#format). No torch, no pickle.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import IO, Any

from pydantic import ValidationError

from holdfast_workers.checkpoint.load import load_state
from holdfast_workers.checkpoint.manifest import (
    MANIFEST,
    BadCheckpoint,
    CheckpointError,
    Manifest,
    OnRead,
    SavedTensor,
    read_manifest,
)
from holdfast_workers.checkpoint.manifest_checks import check_bytes, check_sizes, check_tiling
from holdfast_workers.checkpoint.narrowing import Narrowing, narrow
from holdfast_workers.checkpoint.storage import Storage, joined
from holdfast_workers.spec import BUILT_IN_RECIPES, DataSpec
from holdfast_workers.state.layout import AVERAGES_PREFIX, StateLayout, TensorEntry, module_prefix

_DTYPES = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}
"""The format's name and the bytes of an element for each name of a torch dtype."""
_BROUGHT = ("function", "script", "command", "ray_train")
"""Fields of a stored spec of which one is set if its model is a user's."""
_WEIGHTS = "weights"
"""Key of an export's metadata; its only value is `average`."""
_ALIGNMENT = 8
_ALLOCATED_AT_ONCE = 64 << 20


class NotExportable(CheckpointError):
    """The checkpoint may be whole, but cannot be exported in this form. States the reason."""


@dataclass(frozen=True)
class ExportPlan:
    """The layout of the file, known before any tensor is read."""

    nbytes: int
    fixed: tuple[tuple[int, bytes], ...]
    """All bytes that are of no tensor, each piece with its offset in the file."""
    layout: StateLayout
    """The place of each whole parameter in the file, by its name in the checkpoint."""
    narrowed: tuple[Narrowing, ...] = ()
    """Parameters that `layout` places beyond their place in the file, in the order of both, to be
    narrowed from there."""
    suffix: str = ".safetensors"
    """Of the file's name."""
    note: str = ""
    """What a user has to know of the file."""

    @property
    def room_bytes(self) -> int:
        """The most bytes that the file has while it is made."""
        return max(self.nbytes, self.layout.payload_bytes)


def read_plan(
    checkpoint: Storage,
    plan: Callable[[Manifest], ExportPlan] | None = None,
    *,
    averages: bool = False,
) -> tuple[Manifest, ExportPlan]:
    """The checkpoint's manifest and the plan of it; by default :func:`plan_export`. `averages`: the
    weights are the moving averages. Raises NotExportable, ObjectMissing, StorageError, and
    BadCheckpoint if its files have not the size that the manifest says: its word alone must not
    fill a disk."""
    manifest = read_manifest(checkpoint)
    if averages:
        manifest = averaged(manifest)
    planned = (plan or plan_export)(manifest)
    check_sizes(manifest, checkpoint.objects())
    return manifest, planned


def averaged(manifest: Manifest) -> Manifest:
    """The manifest with the moving averages as the model's weights. Raises NotExportable."""
    training = stored_training(manifest)
    is_average = stored_section(training, "train").get("ema") is not None
    if not is_average or training.get("recipe") not in BUILT_IN_RECIPES:
        raise NotExportable("its job had no train.ema, so there is no average of its weights")
    tensors = tuple(
        replace(tensor, weight=tensor.name.startswith(AVERAGES_PREFIX))
        for tensor in manifest.tensors
    )
    return replace(manifest, tensors=tensors, extra={**manifest.extra, _WEIGHTS: "average"})


def plan_export(manifest: Manifest) -> ExportPlan:
    """Plan a file of the checkpoint's model weights under the model's own names. With several
    modules, the name of each precedes its own. The metadata of a language model of the built-in
    recipe name its tokenizer.

    Raises NotExportable, BadCheckpoint or IncompleteCheckpoint if the manifest promises more than
    it can hold: the plan's size is at most that of the files.
    """
    parameters = exportable_parameters(manifest)
    prefix = module_prefix(parameters)
    names = {name: name.removeprefix(prefix) for name in parameters}
    # The library's order: the widest elements first, so that all tensors stay aligned.
    order = sorted(names, key=lambda name: (-_element(parameters[name])[1], names[name]))
    header = safetensors_header(
        ((names[name], parameters[name].dtype, parameters[name].global_shape) for name in order),
        run_metadata(manifest) | _tokenizer_metadata(manifest),
    )
    entries: list[TensorEntry] = []
    end = len(header)
    for name in order:
        entries.append(whole_entry(parameters[name], end))
        end += entries[-1].nbytes
    return ExportPlan(end, ((0, header),), StateLayout(tuple(entries), end))


def exportable_parameters(manifest: Manifest) -> dict[str, SavedTensor]:
    """:func:`model_parameters` of a manifest whose tensors are whole. Raises NotExportable,
    BadCheckpoint, IncompleteCheckpoint."""
    if manifest.byteorder != "little":
        raise NotExportable("it was written on a big-endian host, safetensors is little-endian")
    parameters = model_parameters(manifest)
    if not parameters:
        raise NotExportable("it holds no weights of a model")
    _check(manifest)
    return parameters


def run_metadata(manifest: Manifest) -> dict[str, str]:
    """The metadata of a file of safetensors that every export has."""
    metadata = {"format": "pt", "step": str(manifest.step), "attempt": str(manifest.attempt)}
    kind = manifest.extra.get(_WEIGHTS)
    return metadata if kind is None else {**metadata, _WEIGHTS: str(kind)}


def safetensors_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> bytes:
    """The beginning of a file that has tensors of these names, dtypes of torch and shapes, one
    behind another. Raises NotExportable for a dtype that the format does not have."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, dtype, shape in tensors:
        kind, item_bytes = element(name, dtype)
        begin, end = end, end + item_bytes * math.prod(shape)
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // _ALIGNMENT) * _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def write_export(
    checkpoint: Storage,
    plan: ExportPlan,
    target: IO[bytes],
    on_read: OnRead = lambda _: None,
) -> None:
    """Fill `target`, an empty file on a disk, from `checkpoint`.

    Raises BadCheckpoint if the checkpoint is not as it was saved (the target is then invalid),
    NotExportable for a value that the file's dtype does not have, StorageError if it cannot be
    read, OSError if the disk is full.
    """
    # Allocated up front: a write to a mapped page that a full disk cannot back kills the process.
    # In pieces: some file systems write every block.
    for start in range(0, plan.room_bytes, _ALLOCATED_AT_ONCE):
        nbytes = min(_ALLOCATED_AT_ONCE, plan.room_bytes - start)
        os.posix_fallocate(target.fileno(), start, nbytes)
        on_read(0)
    mapped = mmap.mmap(target.fileno(), plan.room_bytes)
    load_state(checkpoint, plan.layout, memoryview(mapped), mesh={}, rank=0, on_read=on_read)
    for tensor in plan.narrowed:
        try:
            for _ in narrow(mapped, tensor):
                on_read(0)
        except FloatingPointError as error:
            raise NotExportable(
                f"{tensor.name} has a value that is too large for {tensor.dtype}, the dtype of the "
                "published weights: export it with its own names"
            ) from error
    for offset, content in plan.fixed:
        mapped[offset : offset + len(content)] = content
    os.ftruncate(target.fileno(), plan.nbytes)


def bytes_to_read(manifest: Manifest) -> int:
    """The size of all files that an export reads."""
    wanted = {tensor.file for tensor in _model_tensors(manifest)}
    return sum(file.nbytes for file in manifest.files if file.name in wanted)


def model_parameters(manifest: Manifest) -> dict[str, SavedTensor]:
    """Any one box of every weight of a model, by its name in the checkpoint."""
    return {tensor.name: tensor for tensor in _model_tensors(manifest)}


def own_name(weight: str) -> str:
    """The model's own name of a parameter, by that in the checkpoint."""
    return weight.partition(".")[2]


def _model_tensors(manifest: Manifest) -> Iterator[SavedTensor]:
    return (tensor for tensor in manifest.tensors if tensor.weight and not tensor.per_rank)


def _check(manifest: Manifest) -> None:
    """Raises BadCheckpoint, IncompleteCheckpoint."""
    tensors = list(_model_tensors(manifest))
    for part in tensors:
        expected = part.box.volume * _element(part)[1]
        if part.nbytes != expected:
            reason = f"{part.name} at {part.offsets} has {part.nbytes} bytes, not {expected}"
            raise BadCheckpoint(joined(manifest.uri, MANIFEST), reason)
    check_bytes(manifest, tensors)
    check_tiling(manifest.uri, tensors)


def whole_entry(tensor: SavedTensor, offset: int) -> TensorEntry:
    """The place of the whole tensor at `offset`."""
    shape = tensor.global_shape
    return TensorEntry(
        name=tensor.name,
        dtype=tensor.dtype,
        global_shape=shape,
        offsets=(0,) * len(shape),
        shape=shape,
        offset=offset,
        nbytes=_element(tensor)[1] * math.prod(shape),
    )


def _element(tensor: SavedTensor) -> tuple[str, int]:
    return element(tensor.name, tensor.dtype)


def element(name: str, dtype: str) -> tuple[str, int]:
    """The format's name of a dtype of torch, and the bytes of an element. Raises NotExportable,
    with the tensor's name."""
    try:
        return _DTYPES[dtype.removeprefix("torch.")]
    except KeyError as error:
        raise NotExportable(f"{name} is {dtype}, which safetensors does not support") from error


def _tokenizer_metadata(manifest: Manifest) -> dict[str, str]:
    """What a program needs to find the tokenizer of a language model of the recipe `pretrain`; {}
    if this version cannot read the stored spec."""
    training = stored_training(manifest)
    brings_code = any(training.get(name) for name in _BROUGHT)
    is_text = stored_section(training, "model").get("family", "llama") != "vit"
    if training.get("recipe") not in BUILT_IN_RECIPES or brings_code or not is_text:
        return {}
    data = stored_data(training)
    if data is None:
        return {}
    found = {"tokenizer": data.tokenizer, "tokenizer_digest": "", "vocabulary": ""}
    if data.vocabulary is not None:
        found["vocabulary"] = str(data.vocabulary)
    if data.prepared and data.prepared[0].tokenizer is not None:
        found["tokenizer_digest"] = data.prepared[0].tokenizer
    if data.special_tokens:
        tokens = {role: token.model_dump() for role, token in data.special_tokens.items()}
        found["special_tokens"] = json.dumps(tokens)
    return {name: text for name, text in found.items() if text}


def stored_training(manifest: Manifest) -> Mapping[str, Any]:
    """The stored spec of the run, maybe of another version; {}: there is none."""
    return stored_section(manifest.extra, "training")


def stored_section(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = document.get(name)
    return found if isinstance(found, Mapping) else {}


def stored_data(training: Mapping[str, Any]) -> DataSpec | None:
    """The fields of the stored section that describe the tokenizer; None: this version cannot read
    them."""
    stored = stored_section(training, "data")
    known = ("tokenizer", "prepared", "special_tokens")
    try:
        return DataSpec.model_validate({name: stored[name] for name in known if name in stored})
    except ValidationError:
        return None
