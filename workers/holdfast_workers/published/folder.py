"""A published folder as a whole: its configuration, and files that have what that asks for.

Pure but for the files that it reads: configuration, index and headers, and of the weights only a
head that must be equal to the embedding.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from holdfast_workers.models.llama_parameters import Shape, hugging_face_name, parameter_shapes
from holdfast_workers.published.model_config import PublishedConfig, UnfitConfig, read_config
from holdfast_workers.published.shown_values import shown, shown_name
from holdfast_workers.published.weight_files import (
    BUFFER,
    CONFIG,
    PublishedTensor,
    UnfitWeights,
    WantedTensors,
    find_tensors,
    opened,
    paths_refused,
    read_json,
)
from holdfast_workers.published.weight_set import CHUNK_BYTES, read_into
from holdfast_workers.spec import ModelSpec
from holdfast_workers.spec.model import OF_PUBLISHED, ComputeDtype, Family, WeightDtype

OTHERS = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja"),
    "generation_config.json",
)
"""The small files that belong to a model: of its tokenizer, and for generation."""
_LARGEST_OTHER = 64 << 20
_DTYPES: Mapping[str, WeightDtype] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_NAMED = 3
"""Names of tensors in a sentence, at most."""


@dataclass(frozen=True)
class PublishedFolder:
    """What a folder says of itself, without its weights."""

    config: PublishedConfig
    document: Mapping[str, Any]
    """Its config.json."""
    tensors: dict[str, PublishedTensor]
    """All that the model has, by their published names."""
    files: tuple[tuple[str, int], ...]
    """Name and bytes of each file of weights."""
    others: tuple[str, ...]
    """The names of its small files."""
    dtype: WeightDtype | None
    """Of all tensors; None: they have several."""


def read_folder(
    folder: Path, family: Family = "llama", dtype: ComputeDtype = "float32"
) -> PublishedFolder:
    """The folder of a model that a family computes in a dtype. Raises UnfitConfig and UnfitWeights,
    with the folder or file at fault, and OSError for an error of reading that may pass."""
    with paths_refused():
        return _read(folder, family, dtype)


def _read(folder: Path, family: Family, dtype: ComputeDtype) -> PublishedFolder:
    names = {path.name for path in folder.iterdir()}
    if CONFIG not in names:
        raise UnfitWeights(f"{folder} has no {CONFIG}: name the folder of a whole model")
    document = read_json(folder / CONFIG)
    try:
        config, wanted = _described(document, family, dtype)
    except UnfitConfig as error:
        raise UnfitConfig(f"{folder / CONFIG}: {error}") from error
    found = find_tensors(folder)
    files = sorted({tensor.file for tensor in found.values()})
    tensors = _chosen(folder, wanted, found)
    sizes = tuple((name, (folder / name).stat().st_size) for name in files)
    others = tuple(name for name in OTHERS if name in names)
    for name in others:
        with opened(folder / name) as file:
            if os.fstat(file.fileno()).st_size > _LARGEST_OTHER:
                raise UnfitWeights(f"{folder / name} is larger than {_LARGEST_OTHER >> 20} MiB")
    return PublishedFolder(config, document, tensors, sizes, others, dtype_of(tensors.values()))


def _described(
    document: Any, family: Family, dtype: ComputeDtype
) -> tuple[PublishedConfig, WantedTensors]:
    """Raises UnfitConfig."""
    if family == "transformers":
        # Late import: it needs torch, which a server does without.
        from holdfast_workers.published.library_config import read_library_config

        return read_library_config(document, dtype)
    config = read_config(document)
    model = model_of(config)
    tied = {_HEAD: _EMBEDDING} if model.tied_embeddings else {}
    return config, WantedTensors(published_shapes(model), tied, _is_buffer)


def model_of(config: PublishedConfig) -> ModelSpec:
    """The model that a configuration describes. Raises UnfitConfig."""
    try:
        return ModelSpec(**config.fields)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = ".".join(map(str, fault["loc"]))
        raise UnfitConfig(f"{where} is {shown(fault['input'])}: {fault['msg']}") from error


def difference(model: ModelSpec, document: Mapping[str, Any]) -> str | None:
    """The first field of a job's model that is not as in the config.json of the published model
    that it began with, and both values; None: all are. Raises UnfitConfig."""
    if model.family == "transformers":
        assert model.published is not None
        same = model.published.config == document
        return None if same else f"model.published.config is not the {CONFIG} of {model.source}"
    published = model_of(read_config(document))
    for name in OF_PUBLISHED:
        ours, theirs = getattr(model, name), getattr(published, name)
        if ours != theirs:
            return f"model.{name} is {ours}, and {theirs} in the {CONFIG} of {model.source}"
    return None


def dtype_of(tensors: Iterable[PublishedTensor]) -> WeightDtype | None:
    """The dtype of all tensors; None: they have several."""
    dtypes = {tensor.dtype for tensor in tensors}
    return _DTYPES[dtypes.pop()] if len(dtypes) == 1 else None


def published_shapes(model: ModelSpec) -> dict[str, Shape]:
    """The tensors of a model by their published names, with their shapes."""
    assert model.vocabulary is not None  # each configuration has it
    shapes = parameter_shapes(model, model.vocabulary)
    return {hugging_face_name(name): shape for name, shape in shapes.items()}


def _chosen(
    folder: Path, wanted: WantedTensors, found: Mapping[str, PublishedTensor]
) -> dict[str, PublishedTensor]:
    """The tensors of the model, under its names. Raises UnfitWeights, OSError."""
    of_model: dict[str, list[PublishedTensor]] = {}
    unknown = []
    for name in sorted(found, key=lambda name: (name not in wanted.shapes, name == _HEAD, name)):
        own = wanted.aliases.get(name, name)
        if own in wanted.shapes:
            of_model.setdefault(own, []).append(found[name])
        elif not wanted.is_ignored(name):
            unknown.append(name)
    if missing := wanted.shapes.keys() - of_model.keys():
        raise UnfitWeights(
            f"{folder} lacks {_listed(missing)}, which its {CONFIG} asks for{_remedy(unknown)}"
        )
    if unknown:
        raise UnfitWeights(
            f"{folder} has {_listed(unknown)}, which the model of its {CONFIG} does not have"
        )
    for name, shape in wanted.shapes.items():
        first, *others = of_model[name]
        if first.shape != shape:
            raise UnfitWeights(
                f"{folder / first.file}: {first.name} has the shape {shown(first.shape)}, and not "
                f"{shape} as {CONFIG} says: copy both from the same model"
            )
        for other in others:
            _check_tied(folder, other, first)
    return {name: replace(of_model[name][0], name=name) for name in wanted.shapes}


def _remedy(unknown: Sequence[str]) -> str:
    if not unknown:
        return ""
    return (
        f", and has {_listed(unknown)} beside it: if transformers loads the folder, save it anew "
        "with save_pretrained(folder, save_original_format=False)"
    )


def _check_tied(folder: Path, head: PublishedTensor, embedding: PublishedTensor) -> None:
    """Raises UnfitWeights if a model with tied embeddings has a head of its own: other libraries
    compute with it. Raises OSError."""
    if (head.dtype, head.shape) != (embedding.dtype, embedding.shape) or not _are_equal(
        folder, head, embedding
    ):
        raise UnfitWeights(
            f"{folder}: tie_word_embeddings is true, and {head.name} is not equal to "
            f"{embedding.name}: set tie_word_embeddings to false in {CONFIG}, or remove {head.name}"
        )


def _are_equal(folder: Path, one: PublishedTensor, other: PublishedTensor) -> bool:
    """Whether two tensors of the same size have the same bytes. In the memory of two chunks."""
    buffers = [memoryview(bytearray(CHUNK_BYTES)) for _ in range(2)]
    with opened(folder / one.file) as first, opened(folder / other.file) as second:
        files = (first.fileno(), second.fileno())
        for at in range(0, one.nbytes, CHUNK_BYTES):
            size = min(CHUNK_BYTES, one.nbytes - at)
            parts = [buffer[:size] for buffer in buffers]
            for file, tensor, part in zip(files, (one, other), parts, strict=True):
                if read_into(file, part, tensor.begin + at) != size:
                    raise UnfitWeights(f"{folder / tensor.file} changes while it is read")
            if parts[0] != parts[1]:
                return False
    return True


def _is_buffer(name: str) -> bool:
    return name.endswith(BUFFER)


def _listed(names: Iterable[str]) -> str:
    first = sorted(names)
    more = f" and {len(first) - _NAMED} more tensors" if len(first) > _NAMED else ""
    return ", ".join(map(shown_name, first[:_NAMED])) + more
