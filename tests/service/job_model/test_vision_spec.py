"""Specs of the family `vit`: what it needs, and what it has not."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast_service.errors import InvalidSpec
from holdfast_service.job_model.init_from import SavedCheckpoint, mismatches
from holdfast_service.job_model.job_spec import JobSpec, parse
from holdfast_service.job_model.model_memory import shapes_of
from holdfast_workers.protocol.messages import InitPart

SIZES = {"image_size": 16, "patch_size": 4, "classes": 4}


def document(parallel: dict[str, Any] | None = None, **model: Any) -> dict[str, Any]:
    return {
        "name": "x",
        "model": {"family": "vit", **SIZES, **model},
        "data": {"source": "/images"},
        "parallel": parallel or {},
    }


def faults(spec: dict[str, Any]) -> dict[str, str]:
    with pytest.raises(InvalidSpec) as refused:
        parse(spec, None)
    return {fault["path"]: fault["message"] for fault in refused.value.faults}


def test_a_vision_model_is_accepted_also_with_all_defaults_written_out() -> None:
    spec = parse(document({"dp_shard": 2, "tp": 2, "sequence_parallel": True}), None)
    assert spec.model.positions == 16
    assert parse(spec.model_dump(mode="json"), None) == spec
    assert (spec.mesh_limits.memory_of(spec.parallel.mesh) or 0) > 0


@pytest.mark.parametrize(
    "change",
    [
        {"kv_heads": 2},
        {"sequence_length": 64},
        {"rope_theta": 5e5},
        {"rope_scaling": {"type": "linear"}},
        {"tied_embeddings": True},
    ],
    ids=str,
)
def test_what_only_language_models_have_is_refused(change: dict[str, Any]) -> None:
    (name,) = change
    assert faults(document(**change)) == {
        f"model.{name}": f"a model of the family vit has no {name}: remove it"
    }


@pytest.mark.parametrize("axis", [{"vocabulary_parallel": True}, {"cp": 2}], ids=str)
def test_parallelism_of_texts_is_refused(axis: dict[str, Any]) -> None:
    (name,) = axis
    assert "has no" in faults(document(axis))[f"parallel.{name}"]


@pytest.mark.parametrize("name", SIZES)
def test_its_sizes_are_needed_and_only_for_it(name: str) -> None:
    assert faults(document(**{name: None})) == {
        f"model.{name}": f"a model of the family vit needs {name}: set it"
    }
    found = faults({"name": "x", "model": {name: 4}})
    assert found == {f"model.{name}": f"{name} is for models of the family vit: remove it"}


def test_sizes_that_do_not_fit_are_refused() -> None:
    assert (
        "16 is not divisible by patch_size 5" in faults(document(patch_size=5))["model.patch_size"]
    )
    assert "model.patch_size" in faults(document(patch_size=32))
    assert "model.classes" in faults(document(classes=1))
    odd = document({"tp": 2, "sequence_parallel": True}, image_size=12)
    assert "the 9 patches" in faults(odd)["parallel.sequence_parallel"]
    parse(document({"tp": 2}, image_size=12), None)
    assert set(faults(document({"tp": 3}))) == {"parallel.tp"}


def test_images_have_no_default() -> None:
    found = faults({**document(), "data": {}})
    assert found["data.source"].endswith("needs a folder with a subfolder of images per class")


def test_a_vision_job_starts_from_another_of_the_same_sizes() -> None:
    def spec(**model: Any) -> JobSpec:
        return JobSpec.model_validate({**document(**model), "init_from": "a/6"})

    there = spec()
    saved = SavedCheckpoint(6, shapes_of(there), there.training().model_dump(mode="json"))
    assert mismatches(spec(dropout=0.1), saved, InitPart.EVERYTHING) == []
    found = mismatches(spec(image_size=32), saved, InitPart.MODEL)
    assert found == [
        "embedding.positions has shape (16, 128) in the checkpoint, (64, 128) in the model"
    ]
