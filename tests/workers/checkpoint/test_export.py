from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file
from tests.support.checkpoint.model_checkpoint import save_model
from tests.support.checkpoint.saved_worlds import global_state, save_world

from holdfast_workers.checkpoint.export import NotExportable, plan_export, write_export
from holdfast_workers.checkpoint.manifest import BadCheckpoint
from holdfast_workers.checkpoint.storage import Storage, write_small
from holdfast_workers.models.llama_parameters import hugging_face_name, parameter_shapes
from holdfast_workers.spec import DataSpec, ModelSpec, SourceSpec, TrainingSpec

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
        data=DataSpec(tokenizer="/models/a", sources=(SourceSpec(path="/data"),)),
    )
    manifest = save_model(root, 8, training)
    target = tmp_path / "model.safetensors"
    with target.open("w+b") as file:
        write_export(root.below(manifest.folder), plan_export(manifest, hugging_face=True), file)
    with safe_open(target, framework="numpy") as exported:
        shapes = {name: tuple(exported.get_slice(name).get_shape()) for name in exported.keys()}  # noqa: SIM118
        assert exported.metadata()["tokenizer"] == "/models/a"
    own = parameter_shapes(training.model, 256)
    assert shapes == {hugging_face_name(name): shape for name, shape in own.items()}


def test_a_vision_model_is_exported_with_its_own_names(root: Storage) -> None:
    sizes = {"image_size": 8, "patch_size": 4, "classes": 3}
    model = {"family": "vit", "dim": 32, "layers": 1, "heads": 2, **sizes}
    manifest = save_model(root, 8, TrainingSpec(model=ModelSpec.model_validate(model)))
    header = plan_export(manifest).header
    assert b'"embedding.positions":{"dtype":"F32","shape":[4,32]' in header
    with pytest.raises(NotExportable, match="has biases and a class token"):
        plan_export(manifest, hugging_face=True)
