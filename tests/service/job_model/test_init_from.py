from __future__ import annotations

from typing import Any

import pytest

from holdfast_service.job_model.init_from import (
    FolderReference,
    SavedCheckpoint,
    mismatches,
    parse_reference,
    part_to_load,
)
from holdfast_service.job_model.job_reference import JobReference
from holdfast_service.job_model.job_spec import JobSpec
from holdfast_workers.models.llama_parameters import parameter_shapes
from holdfast_workers.protocol.messages import InitPart
from holdfast_workers.spec import ModelSpec


def _spec(**changes: Any) -> JobSpec:
    return JobSpec(**{"name": "b", "init_from": "a/6", **changes})


def _saved(spec: JobSpec, step: int = 6) -> SavedCheckpoint:
    shapes = parameter_shapes(spec.model, 256)
    return SavedCheckpoint(step, shapes, spec.training().model_dump(mode="json"))


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("job", JobReference("job", None)),
        ("job/7", JobReference("job", 7)),
        ("/a/b", FolderReference("/a/b", dcp=False)),
        ("s3://a/b", FolderReference("s3://a/b", dcp=False)),
        ("file:///a/b", FolderReference("file:///a/b", dcp=False)),
        ("dcp:/a/b", FolderReference("/a/b", dcp=True)),
    ],
)
def test_kinds_of_references_are_distinguished(text: str, meant: object) -> None:
    assert parse_reference(text) == meant


@pytest.mark.parametrize("text", ["job/", "job/x", "/".join("abc"), "job/-1", "job/1/2", "job/²"])
def test_a_malformed_reference_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="JOB/STEP"):
        parse_reference(text)


def test_everything_is_loaded_from_the_same_model_and_only_the_model_from_another() -> None:
    here = _spec()
    assert part_to_load(here, _saved(here)) is InitPart.EVERYTHING
    longer = _spec(model=ModelSpec(sequence_length=512))
    assert part_to_load(longer, _saved(here)) is InitPart.MODEL
    assert part_to_load(here, SavedCheckpoint(6, {}, None)) is InitPart.MODEL
    explicit = _spec(init_from={"from": "a", "what": "model"})
    assert part_to_load(explicit, _saved(here)) is InitPart.MODEL


def test_the_same_run_on_another_mesh_fits() -> None:
    there = _spec(parallel={"dp_shard": 2, "tp": 2})
    here = _spec(parallel={"dp_shard": 4, "tp": 1})
    for part in InitPart:
        assert mismatches(here, _saved(there), part) == []


def test_different_shapes_and_names_are_listed() -> None:
    there, here = _spec(), _spec(model=ModelSpec(dim=64, layers=5))
    faults = mismatches(here, _saved(there), InitPart.MODEL)
    assert (
        faults[0]
        == "embedding.weight has shape (256, 128) in the checkpoint, (256, 64) in the model"
    )
    assert faults[-1].endswith("more")
    deeper = mismatches(_spec(model=ModelSpec(layers=5)), _saved(there), InitPart.MODEL)
    assert deeper == [
        "the checkpoint has no blocks.4.attention_norm.weight, blocks.4.attention.query.weight, "
        "blocks.4.attention.key.weight and 6 more"
    ]


def test_loading_everything_needs_the_same_samples_and_remaining_steps() -> None:
    there = _spec()
    here = _spec(
        train={**there.train.model_dump(), "seed": 8, "steps": 6, "schedule": {"warmup_steps": 3}}
    )
    faults = mismatches(here, _saved(there), InitPart.EVERYTHING)
    assert faults[0] == "the checkpoint is at step 6, and train.steps is only 6"
    assert [fault.split(" is ")[0] for fault in faults[1:]] == ["train.seed", "train.schedule"]
    assert mismatches(here, _saved(there), InitPart.MODEL) == []
