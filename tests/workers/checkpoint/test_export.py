from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.support.checkpoint.model_checkpoint import save_model
from tests.support.checkpoint.saved_worlds import global_state, save_world

from holdfast_workers.checkpoint.export import NotExportable, plan_export, write_export
from holdfast_workers.checkpoint.manifest import BadCheckpoint, Manifest
from holdfast_workers.checkpoint.open_storage import open_storage
from holdfast_workers.checkpoint.storage import Storage, write_small
from holdfast_workers.published.folder_parts import read_parts
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


def test_an_export_names_the_tokenizer_that_belongs_to_it(root: Storage) -> None:
    model = ModelSpec(dim=32, layers=1, heads=2, sequence_length=16)
    prepared = save_model(root, 8, TrainingSpec(model=model, data=DATA))
    metadata = metadata_of(plan_export(prepared).fixed[0][1])
    assert json.loads(metadata.pop("special_tokens")) == {
        "document_end": {"id": 7, "token": "<|end|>"},
        "pad": {"id": 5, "token": "<|pad|>"},
    }
    assert metadata == {
        **{"format": "pt", "step": "8", "attempt": "1"},
        **{"tokenizer": "/models/a", "tokenizer_digest": DIGEST, "vocabulary": "256"},
    }
    bytes_only = save_model(root, 9, TrainingSpec(model=model))
    metadata = metadata_of(plan_export(bytes_only).fixed[0][1])
    assert (metadata["tokenizer"], metadata["vocabulary"]) == ("bytes", "256")
    own = save_model(root, 10, TrainingSpec(model=model, recipe="a:b"))
    assert "tokenizer" not in metadata_of(plan_export(own).fixed[0][1])


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
        assert metadata_of(plan_export(known).fixed[0][1])["tokenizer_digest"] == DIGEST
        read_parts(known, open_storage)
    set_of_another = {**data, "prepared": [{**data["prepared"][0], "newer": 1}]}
    for section, content in (("model", own), ("data", set_of_another)):
        unknown = stored(saved, **{section: content})
        plan_export(unknown)
        with pytest.raises(NotExportable, match=f"cannot read the section {section} of its spec"):
            read_parts(unknown, open_storage)
    without: list[dict[str, Any]] = [
        {"recipe": "a:b", "model": own},
        {"function": "a:b"},
        {"data": set_of_another},
    ]
    for changes in without:
        assert "tokenizer" not in metadata_of(plan_export(stored(saved, **changes)).fixed[0][1])
    for training in (None, "x", [1]):
        bare = replace(saved, extra={"training": training})
        assert "tokenizer" not in metadata_of(plan_export(bare).fixed[0][1])
        with pytest.raises(NotExportable, match="only for the recipe pretrain"):
            read_parts(bare, open_storage)


def metadata_of(header: bytes) -> dict[str, str]:
    found: dict[str, str] = json.loads(header[8:])["__metadata__"]
    return found


def test_a_vision_model_is_exported_with_its_own_names(root: Storage) -> None:
    sizes = {"image_size": 8, "patch_size": 4, "classes": 3}
    model = {"family": "vit", "dim": 32, "layers": 1, "heads": 2, **sizes}
    manifest = save_model(root, 8, TrainingSpec(model=ModelSpec.model_validate(model)))
    header = plan_export(manifest).fixed[0][1]
    assert b'"embedding.positions":{"dtype":"F32","shape":[4,32]' in header
    with pytest.raises(NotExportable, match="has biases and a class token"):
        read_parts(manifest, open_storage)
