"""The small files of an exported folder: configuration and tokenizer. Some come from the store of
the job: those of the published model that it began with, and of the tokenizer of its token sets."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from holdfast_workers.checkpoint.export import (
    NotExportable,
    model_parameters,
    own_name,
    stored_data,
    stored_section,
    stored_training,
)
from holdfast_workers.checkpoint.manifest import Manifest
from holdfast_workers.checkpoint.storage import ObjectMissing, Storage, joined
from holdfast_workers.models.llama_parameters import (
    NoArchitecture,
    hugging_face_config,
    hugging_face_ids,
)
from holdfast_workers.published.folder import difference, dtype_of
from holdfast_workers.published.kept_tokenizer import TOKENIZER, kept_tokenizer
from holdfast_workers.published.model_config import UnfitConfig
from holdfast_workers.published.weight_files import CONFIG
from holdfast_workers.published.weight_set import (
    MANIFEST,
    OTHERS,
    BadWeightSet,
    WeightFile,
    WeightSet,
    digest_of,
)
from holdfast_workers.spec import DataSpec, Family, ModelSpec, PublishedSpec, SpecialRole
from holdfast_workers.spec.model import WeightDtype
from holdfast_workers.spec.train import BYTES

GENERATION = "generation_config.json"
_GENERATION_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
_OTHER_TOKENIZER = (
    "the job has another tokenizer than the published model: the ids of special tokens are those "
    f"of its own, and the published {GENERATION} is left out"
)

OpenStorage = Callable[[str], Storage]
"""Opens a folder of the job's store by its URI. Raises NotExportable for a URI elsewhere."""


@dataclass(frozen=True)
class FolderParts:
    files: Mapping[str, bytes]
    """All files but those of the weights, by name."""
    dtype: WeightDtype
    """Of the weights."""
    family: Family = "llama"
    """Whose names its weights have."""
    note: str = ""
    """What a user has to know of them."""


def read_parts(manifest: Manifest, open_storage: OpenStorage) -> FolderParts:
    """The parts for a checkpoint. Raises NotExportable, StorageError."""
    model, data = _stored_text_model(manifest)
    published = model.published
    config: Mapping[str, Any]
    files: dict[str, bytes]
    if published is None:
        config, files = _own_config(manifest, model, data), {}
    else:
        config, files = _published(model, published, open_storage)
    generation = files.pop(GENERATION, None)
    notes: list[str] = []
    if not _is_tokenizer_of(files, data):
        files, notes = _of_token_set(data, open_storage)
        if published is not None:
            config, generation = {**config, **hugging_face_ids(_special_ids(data))}, None
            notes.append(_OTHER_TOKENIZER)
    dtype: WeightDtype = (published and published.dtype) or "float32"
    # Of its two names, every version of the library reads this one.
    config = {key: value for key, value in config.items() if key != "dtype"}
    documents = {CONFIG: _json({**config, "torch_dtype": dtype})}
    if generation is None:
        ids = {key: config[key] for key in _GENERATION_KEYS if config.get(key) is not None}
        generation = _json(ids)
    documents[GENERATION] = generation
    return FolderParts(documents | files, dtype, model.family, "; ".join(notes))


def _stored_text_model(manifest: Manifest) -> tuple[ModelSpec, DataSpec]:
    """The sections `model` and `data` of a language model. Raises NotExportable."""
    training = stored_training(manifest)
    if training.get("recipe") != "pretrain":
        raise NotExportable(
            f"Hugging Face's names are known only for the recipe pretrain, this checkpoint is of "
            f"{training.get('recipe')!r}: export it with its own names"
        )
    stored = stored_section(training, "model")
    if stored.get("family") == "vit":
        raise NotExportable(
            "Hugging Face's ViT has biases and a class token, which the family vit has not: export "
            "it with its own names"
        )
    data = stored_data(training)
    try:
        model = ModelSpec.model_validate(stored)
    except ValidationError:
        model = None
    if model is None or data is None:
        raise NotExportable(
            f"this version of Holdfast cannot read the section {'data' if model else 'model'} of "
            "its spec, which Hugging Face's config.json is made of: export it with its own names"
        )
    return model, data


def _own_config(manifest: Manifest, model: ModelSpec, data: DataSpec) -> dict[str, Any]:
    named = {own_name(name): saved for name, saved in model_parameters(manifest).items()}
    embedding = named.get("embedding.weight")
    if embedding is None:
        raise NotExportable("it has no embedding: it is not a Llama of Holdfast")
    try:
        return hugging_face_config(model, embedding.global_shape[0], _special_ids(data))
    except NoArchitecture as error:
        raise NotExportable(f"{error}: export it with its own names") from error


def _special_ids(data: DataSpec) -> dict[SpecialRole, int]:
    return {role: token.id for role, token in data.special_tokens.items()}


def _published(
    model: ModelSpec, published: PublishedSpec, open_storage: OpenStorage
) -> tuple[Mapping[str, Any], dict[str, bytes]]:
    """The published model's configuration, which must be that of `model`, and its small files."""
    storage = open_storage(published.uri)
    where = joined(published.uri, MANIFEST)
    try:
        weights = WeightSet.decode(storage.read(MANIFEST), published.digest, where)
        beside = storage.below(OTHERS)
        files = {file.name: _read(beside, file, weights.chunk_bytes) for file in weights.others}
    except (ObjectMissing, BadWeightSet) as error:
        raise NotExportable(
            f"the configuration of the published model is not as it was ({error}): submit a job "
            "with the same model.from, which writes it again, or export it with its own names"
        ) from error
    try:
        found = difference(model, weights.config)
    except UnfitConfig as error:
        raise NotExportable(f"{where}: {error}: export it with its own names") from error
    if found is None and (dtype := dtype_of(weights.tensors)) != published.dtype:
        found = f"model.published.dtype is {published.dtype}, and {dtype} in {where}"
    if found is not None:
        raise NotExportable(f"{found}: export it with its own names")
    return weights.config, files


def _read(storage: Storage, file: WeightFile, chunk_bytes: int) -> bytes:
    """Raises ObjectMissing, BadWeightSet."""
    content = storage.read(file.name)
    if WeightFile.of(file.name, content, chunk_bytes) != file:
        raise BadWeightSet(f"{joined(storage.uri, file.name)} is damaged")
    return content


def _is_tokenizer_of(files: Mapping[str, bytes], data: DataSpec) -> bool:
    """Whether the job's tokenizer is the one among the files."""
    if not data.prepared or TOKENIZER not in files:
        return False
    return digest_of(files[TOKENIZER]) == data.prepared[0].tokenizer


def _of_token_set(data: DataSpec, open_storage: OpenStorage) -> tuple[dict[str, bytes], list[str]]:
    """The files that are kept beside the job's token sets, and what a user has to know of them."""
    if data.tokenizer == BYTES:
        return {}, ["it has no tokenizer: its tokens are the bytes of the text"]
    if data.prepared:
        prepared = data.prepared[0]
        try:
            files = kept_tokenizer(prepared, open_storage(prepared.uri))
        except (ObjectMissing, BadWeightSet) as error:
            raise NotExportable(f"{error}: export it with its own names") from error
        if files:
            return files, []
    return {}, [
        "it has no tokenizer, as none is kept beside its token sets: copy the files of "
        f"{data.tokenizer} into it"
    ]


def _json(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(document, indent=2) + "\n").encode()
