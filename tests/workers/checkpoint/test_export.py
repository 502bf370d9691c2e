from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file
from tests.support.checkpoint.model_checkpoint import save_model
from tests.support.checkpoint.saved_worlds import global_state, save_world

from holdfast_workers.checkpoint.export import NotExportable, plan_export, write_export
from holdfast_workers.checkpoint.manifest import BadCheckpoint, Manifest
from holdfast_workers.checkpoint.storage import Storage, write_small
from holdfast_workers.models.llama_parameters import hugging_face_name, parameter_shapes
from holdfast_workers.spec import (
    DataSpec,
    ModelSpec,
    PreparedSpec,
    SourceSpec,
    SpecialTokenSpec,
    TrainingSpec,
)

DIGEST = "0123456789abcdef" * 2
SOURCE = SourceSpec(path="/data")
DATA = DataSpec(
    tokenizer="/models/a",
    sources=(SOURCE,),
    prepared=(
        PreparedSpec(
            uri="/sets/a",
            origin="",
            digest=DIGEST,
            vocabulary=256,
            tokens=9,
            tokenizer=DIGEST,
            document_end=7,
        ),
    ),
    special_tokens={
        "document_end": SpecialTokenSpec(id=7, token="<|end|>"),
        "pad": SpecialTokenSpec(id=5, token="<|pad|>"),
    },
)
MESHES = [{"dp_shard": 2, "tp": 2}, {"dp_shard": 1, "tp": 4}, {"dp_shard": 1, "tp": 1}]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_boxes_of_any_mesh_are_exported_as_whole_tensors(
    root: Storage, tmp_path: Path, mesh: dict[str, int]
) -> None:
    manifest = save_world(root, 7, 1, mesh)
    plan = plan_export(manifest)
    target = tmp_path / "model.safetensors"
    with target.open("w+b") as file:
        write_export(root.below(manifest.folder), plan, file)
    assert target.stat().st_size == plan.nbytes
    loaded = load_file(target)
    expected = {
        name: values for name, values in global_state().items() if name.startswith("model.")
    }
    assert set(loaded) == {name.removeprefix("model.") for name in expected}
    for name, values in expected.items():
        assert np.array_equal(loaded[name.removeprefix("model.")], values)


def test_an_export_detects_a_flipped_byte_anywhere(root: Storage, tmp_path: Path) -> None:
    manifest = save_world(root, 7, 1, MESHES[0])
    checkpoint = root.below(manifest.folder)
    content = bytearray(checkpoint.read("__3_0.distcp"))
    content[-1] ^= 1  # no parameter's byte
    write_small(checkpoint, "__3_0.distcp", bytes(content))
    with (tmp_path / "x").open("w+b") as file, pytest.raises(BadCheckpoint, match="__3_0"):
        write_export(checkpoint, plan_export(manifest), file)


def test_hugging_face_names_need_the_built_in_llama(root: Storage, tmp_path: Path) -> None:
    with pytest.raises(NotExportable, match="own names"):
        plan_export(save_world(root, 7, 1, MESHES[0]), hugging_face=True)
    training = TrainingSpec(
        model=ModelSpec(dim=32, layers=1, heads=2, sequence_length=16),
        data=DATA,
    )
    manifest = save_model(root, 8, training)
    target = tmp_path / "model.safetensors"
    with target.open("w+b") as file:
        write_export(root.below(manifest.folder), plan_export(manifest, hugging_face=True), file)
    with safe_open(target, framework="numpy") as exported:
        shapes = {name: tuple(exported.get_slice(name).get_shape()) for name in exported.keys()}  # noqa: SIM118
        config = json.loads(exported.metadata()["config"])
    assert [config[f"{role}_token_id"] for role in ("bos", "eos", "pad")] == [None, 7, 5]
    own = parameter_shapes(training.model, 256)
    assert shapes == {hugging_face_name(name): shape for name, shape in own.items()}


def test_an_export_names_the_tokenizer_that_belongs_to_it(root: Storage) -> None:
    model = ModelSpec(dim=32, layers=1, heads=2, sequence_length=16)
    prepared = save_model(root, 8, TrainingSpec(model=model, data=DATA))
    metadata = metadata_of(plan_export(prepared).header)
    assert json.loads(metadata.pop("special_tokens")) == {
        "document_end": {"id": 7, "token": "<|end|>"},
        "pad": {"id": 5, "token": "<|pad|>"},
    }
    assert metadata == {
        **{"format": "pt", "step": "8", "attempt": "1"},
        **{"tokenizer": "/models/a", "tokenizer_digest": DIGEST, "vocabulary": "256"},
    }
    bytes_only = save_model(root, 9, TrainingSpec(model=model))
    metadata = metadata_of(plan_export(bytes_only).header)
    assert (metadata["tokenizer"], metadata["vocabulary"]) == ("bytes", "256")
    own = save_model(root, 10, TrainingSpec(model=model, recipe="a:b"))
    assert "tokenizer" not in metadata_of(plan_export(own).header)


def stored(manifest: Manifest, **changes: Any) -> Manifest:
    training = {**manifest.extra["training"], **changes}
    return replace(manifest, extra={**manifest.extra, "training": training})


def test_a_spec_of_another_version_is_exported_without_what_cannot_be_read(root: Storage) -> None:
    model = ModelSpec(dim=32, layers=1, heads=2, sequence_length=16)
    saved = save_model(root, 8, TrainingSpec(model=model, data=DATA))
    own, data = {"layout": "mine"}, saved.extra["training"]["data"]
    beside: list[dict[str, Any]] = [
        {"newer": 1},
        {"train": {"older": 1}},
        {"data": {**data, "newer": 1}},
        {"data": {**data, "sources": "x"}},
    ]
    for changes in beside:
        known = stored(saved, **changes)
        assert metadata_of(plan_export(known).header)["tokenizer_digest"] == DIGEST
        plan_export(known, hugging_face=True)
    set_of_another = {**data, "prepared": [{**data["prepared"][0], "newer": 1}]}
    for section, content in (("model", own), ("data", set_of_another)):
        unknown = stored(saved, **{section: content})
        plan_export(unknown)
        with pytest.raises(NotExportable, match=f"cannot read the section {section} of its spec"):
            plan_export(unknown, hugging_face=True)
    without: list[dict[str, Any]] = [
        {"recipe": "a:b", "model": own},
        {"function": "a:b"},
        {"data": set_of_another},
    ]
    for changes in without:
        assert "tokenizer" not in metadata_of(plan_export(stored(saved, **changes)).header)
    for training in (None, "x", [1]):
        bare = replace(saved, extra={"training": training})
        assert "tokenizer" not in metadata_of(plan_export(bare).header)
        with pytest.raises(NotExportable, match="only for the recipe pretrain"):
            plan_export(bare, hugging_face=True)


def metadata_of(header: bytes) -> dict[str, str]:
    found: dict[str, str] = json.loads(header[8:])["__metadata__"]
    return found


def test_a_vision_model_is_exported_with_its_own_names(root: Storage) -> None:
    sizes = {"image_size": 8, "patch_size": 4, "classes": 3}
    model = {"family": "vit", "dim": 32, "layers": 1, "heads": 2, **sizes}
    manifest = save_model(root, 8, TrainingSpec(model=ModelSpec.model_validate(model)))
    header = plan_export(manifest).header
    assert b'"embedding.positions":{"dtype":"F32","shape":[4,32]' in header
    with pytest.raises(NotExportable, match="has biases and a class token"):
        plan_export(manifest, hugging_face=True)
