"""Exports a checkpoint's model weights, whole, as one plain safetensors file.

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
from collections.abc import Iterator, Mapping
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
from holdfast_workers.checkpoint.storage import Storage, joined
from holdfast_workers.models.llama_parameters import hugging_face_config, hugging_face_name
from holdfast_workers.spec import BUILT_IN_RECIPES, DataSpec, ModelSpec
from holdfast_workers.state.layout import (
    MODEL_PREFIX,
    StateLayout,
    TensorEntry,
    module_prefix,
)

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
_ALIGNMENT = 8
_ALLOCATED_AT_ONCE = 64 << 20


class NotExportable(CheckpointError):
    """The checkpoint may be whole, but cannot be exported in this form. States the reason."""


@dataclass(frozen=True)
class ExportPlan:
    """The layout of the file, known before any tensor is read."""

    header: bytes
    layout: StateLayout
    """The place of each whole parameter in the file, by its name in the checkpoint."""

    @property
    def nbytes(self) -> int:
        return self.layout.payload_bytes


def read_plan(checkpoint: Storage, *, hugging_face: bool = False) -> tuple[Manifest, ExportPlan]:
    """The checkpoint's manifest and :func:`plan_export` of it. Raises ObjectMissing, StorageError,
    and BadCheckpoint if its files have not the size that the manifest says: its word alone must
    not fill a disk."""
    manifest = read_manifest(checkpoint)
    plan = plan_export(manifest, hugging_face=hugging_face)
    check_sizes(manifest, checkpoint.objects())
    return manifest, plan


def plan_export(manifest: Manifest, *, hugging_face: bool = False) -> ExportPlan:
    """Plan a file of the checkpoint's model weights under the model's own names. With several
    modules, the name of each precedes its own. The metadata of a language model of the built-in
    recipe name its tokenizer.

    `hugging_face`: use the names of `LlamaForCausalLM` and add its `config.json` as metadata; only
    for the built-in Llama. Raises NotExportable, BadCheckpoint or IncompleteCheckpoint if the
    manifest promises more than it can hold: the plan's size is at most that of the files.
    """
    if manifest.byteorder != "little":
        raise NotExportable("it was written on a big-endian host, safetensors is little-endian")
    parameters = model_parameters(manifest)
    if not parameters:
        raise NotExportable("it holds no weights of a model")
    _check(manifest)
    metadata = {"format": "pt", "step": str(manifest.step), "attempt": str(manifest.attempt)}
    prefix = module_prefix(parameters)
    names = {name: name.removeprefix(prefix) for name in parameters}
    metadata |= _tokenizer_metadata(manifest)
    if hugging_face:
        metadata["config"] = json.dumps(_hugging_face_config(manifest, parameters))
        names = {name: _hugging_face_name(name) for name in parameters}
    # The library's order: the widest elements first, so that all tensors stay aligned.
    order = sorted(names, key=lambda name: (-_element(parameters[name])[1], names[name]))
    header: dict[str, Any] = {"__metadata__": metadata}
    entries: list[TensorEntry] = []
    end = 0
    for name in order:
        entry = _whole(parameters[name], end)
        end += entry.nbytes
        header[names[name]] = {
            "dtype": _element(parameters[name])[0],
            "shape": list(entry.shape),
            "data_offsets": [entry.offset, end],
        }
        entries.append(entry)
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // _ALIGNMENT) * _ALIGNMENT)
    head = len(text).to_bytes(8, "little") + text
    placed = tuple(replace(entry, offset=len(head) + entry.offset) for entry in entries)
    return ExportPlan(head, StateLayout(placed, len(head) + end))


def write_export(
    checkpoint: Storage,
    plan: ExportPlan,
    target: IO[bytes],
    on_read: OnRead = lambda _: None,
) -> None:
    """Fill `target`, an empty file on a disk, from `checkpoint`.

    Raises BadCheckpoint if the checkpoint is not as it was saved (the target is then invalid),
    StorageError if it cannot be read, OSError if the disk is full.
    """
    # Allocated up front: a write to a mapped page that a full disk cannot back kills the process.
    # In pieces: some file systems write every block.
    for start in range(0, plan.nbytes, _ALLOCATED_AT_ONCE):
        nbytes = min(_ALLOCATED_AT_ONCE, plan.nbytes - start)
        os.posix_fallocate(target.fileno(), start, nbytes)
        on_read(0)
    mapped = mmap.mmap(target.fileno(), plan.nbytes)
    mapped[: len(plan.header)] = plan.header
    load_state(checkpoint, plan.layout, memoryview(mapped), mesh={}, rank=0, on_read=on_read)


def bytes_to_read(manifest: Manifest) -> int:
    """The size of all files that an export reads."""
    wanted = {tensor.file for tensor in _model_tensors(manifest)}
    return sum(file.nbytes for file in manifest.files if file.name in wanted)


def model_parameters(manifest: Manifest) -> dict[str, SavedTensor]:
    """Any one box of every weight of a model, by its name in the checkpoint."""
    return {tensor.name: tensor for tensor in _model_tensors(manifest)}


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


def _whole(tensor: SavedTensor, offset: int) -> TensorEntry:
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
    try:
        return _DTYPES[tensor.dtype.removeprefix("torch.")]
    except KeyError as error:
        raise NotExportable(
            f"{tensor.name} is {tensor.dtype}, which safetensors does not support"
        ) from error


def _tokenizer_metadata(manifest: Manifest) -> dict[str, str]:
    """What a program needs to find the tokenizer of a language model of the recipe `pretrain`; {}
    if this version cannot read the stored spec."""
    training = _training(manifest)
    brings_code = any(training.get(name) for name in _BROUGHT)
    is_text = _section(training, "model").get("family", "llama") == "llama"
    if training.get("recipe") not in BUILT_IN_RECIPES or brings_code or not is_text:
        return {}
    data = _data(training)
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


def _training(manifest: Manifest) -> Mapping[str, Any]:
    """The stored spec of the run, maybe of another version; {}: there is none."""
    return _section(manifest.extra, "training")


def _section(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = document.get(name)
    return found if isinstance(found, Mapping) else {}


def _data(training: Mapping[str, Any]) -> DataSpec | None:
    """The fields of the stored section that describe the tokenizer; None: this version cannot read
    them."""
    stored = _section(training, "data")
    known = ("tokenizer", "prepared", "special_tokens")
    try:
        return DataSpec.model_validate({name: stored[name] for name in known if name in stored})
    except ValidationError:
        return None


def _hugging_face_config(
    manifest: Manifest, parameters: Mapping[str, SavedTensor]
) -> dict[str, Any]:
    training = _training(manifest)
    if training.get("recipe") != "pretrain":
        raise NotExportable(
            f"Hugging Face's names are known only for the recipe pretrain, this checkpoint is of "
            f"{training.get('recipe')!r}: export it with its own names"
        )
    stored = _section(training, "model")
    if stored.get("family") == "vit":
        raise NotExportable(
            "Hugging Face's ViT has biases and a class token, which the family vit has not: export "
            "it with its own names"
        )
    embedding = parameters.get(f"{MODEL_PREFIX}embedding.weight")
    if embedding is None:
        raise NotExportable("it has no embedding: it is not a Llama of Holdfast")
    data = _data(training)
    try:
        model = ModelSpec.model_validate(stored)
    except ValidationError:
        model = None
    if model is None or data is None:
        raise NotExportable(
            f"this version of Holdfast cannot read the section {'data' if model else 'model'} of "
            "its spec, which Hugging Face's config.json is made of: export it with its own names"
        )
    ids = {role: token.id for role, token in data.special_tokens.items()}
    return hugging_face_config(model, embedding.global_shape[0], ids)


def _hugging_face_name(name: str) -> str:
    try:
        return hugging_face_name(name.removeprefix(MODEL_PREFIX))
    except KeyError as error:
        raise NotExportable(f"Hugging Face's Llama has no parameter for {name!r}") from error
