from __future__ import annotations

from dataclasses import replace
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
from holdfast_service.job_model.model_memory import shapes_of
from holdfast_workers.models.llama_parameters import parameter_shapes
from holdfast_workers.protocol.messages import InitPart
from holdfast_workers.spec import ModelSpec, with_steps


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


def test_a_checkpoint_of_another_version_gives_its_model() -> None:
    here = _spec()
    saved = replace(_saved(here), training={"train": {"of_a_later_version": 1}})
    assert part_to_load(here, saved) is InitPart.MODEL
    assert mismatches(here, saved, InitPart.MODEL) == []
    (why,) = mismatches(here, saved, InitPart.EVERYTHING)
    assert "cannot read the spec in the checkpoint" in why
    assert "set `what: model`" in why


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


def test_loading_everything_needs_the_same_optimizer() -> None:
    there = _spec()
    own = {"optimizer": {"name": "lamb"}, "ema": 0.9, "steps": 9}
    here = _spec(train={**there.train.model_dump(), **own})
    faults = mismatches(here, _saved(there), InitPart.EVERYTHING)
    assert [fault.split(" is ")[0] for fault in faults] == [
        "train.optimizer.name",
        "train.ema",
    ]
    assert mismatches(here, _saved(there), InitPart.MODEL) == []


def test_loading_everything_needs_the_momentum_of_sgd_or_none() -> None:
    def optimized(momentum: float) -> JobSpec:
        optimizer = {"name": "sgd", "lr": 0.1, "momentum": momentum}
        return _spec(train={"steps": 9, "optimizer": optimizer})

    for before, after, count in ((0.9, 0.0, 1), (0.0, 0.9, 1), (0.9, 0.8, 0), (0.0, 0.0, 0)):
        faults = mismatches(optimized(after), _saved(optimized(before)), InitPart.EVERYTHING)
        assert len(faults) == count, faults
        assert all("train.optimizer.momentum" in fault for fault in faults)


def test_a_length_that_is_reached_is_named_as_it_was_written() -> None:
    data = {"sources": [{"path": "/data/a"}]}
    for train, data_, said in (
        ({"tokens": 20_000}, {}, "train.tokens 20,000 comes to only 5 steps"),
        ({"epochs": 2, "steps": 5}, data, "train.epochs 2 comes to only 5 steps"),
    ):
        here = _spec(train=train, data=data_)
        here = here.model_copy(update={"train": with_steps(here)})
        faults = mismatches(here, _saved(here), InitPart.EVERYTHING)
        assert faults == [f"the checkpoint is at step 6, and {said}"]


SOURCES = [{"path": "/data/a.parquet"}, {"path": "s3://lab/b.jsonl", "text": "content"}]
DATA: dict[str, Any] = {"tokenizer": "/models/a/tokenizer.json", "sources": SOURCES}


def _token_set(digit: str, vocabulary: int = 300) -> dict[str, Any]:
    facts = {"uri": f"/sets/{digit}", "origin": digit, "digest": digit * 32}
    return {**facts, "vocabulary": vocabulary, "tokens": 9}


SETS = [_token_set("a"), _token_set("b")]


def _saved_with(vocabulary: int, **data: Any) -> SavedCheckpoint:
    spec = _spec(data=data)
    shapes = parameter_shapes(spec.model, vocabulary)
    return SavedCheckpoint(6, shapes, spec.training().model_dump(mode="json"))


def test_a_vocabulary_that_is_not_known_yet_fits_any_checkpoint() -> None:
    saved = _saved_with(300, **DATA, prepared=SETS)
    for part in InitPart:
        assert mismatches(_spec(data=DATA), saved, part) == []
    deeper = mismatches(_spec(data=DATA, model=ModelSpec(dim=64)), saved, InitPart.MODEL)
    assert (
        deeper[0]
        == "embedding.weight has shape (300, 128) in the checkpoint, (300, 64) in the model"
    )


@pytest.mark.parametrize("data", [{}, {**DATA, "prepared": [_token_set("c", 256)] * 2}], ids=str)
def test_another_vocabulary_is_refused_by_both_sizes(data: dict[str, Any]) -> None:
    saved = _saved_with(300, **DATA, prepared=SETS)
    assert mismatches(_spec(data=data), saved, InitPart.MODEL) == [
        "the vocabulary has 300 tokens in the checkpoint, 256 in this spec: use the tokenizer of "
        "the checkpoint"
    ]


def test_a_model_of_images_is_not_said_to_have_a_vocabulary() -> None:
    sizes = {"image_size": 16, "patch_size": 4, "classes": 4}
    images = JobSpec.model_validate({"name": "a", "model": {"family": "vit", **sizes}})
    saved = SavedCheckpoint(6, shapes_of(images), None)
    assert not any("vocabulary" in why for why in mismatches(_spec(), saved, InitPart.MODEL))


REMEDY = ": make it the same, or set `what: model`"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            {"tokenizer": "/models/b"},
            "data.tokenizer is '/models/a/tokenizer.json' in the checkpoint, '/models/b' in this "
            "spec",
        ),
        (
            {"document_end": "</s>"},
            "data.document_end is None in the checkpoint, '</s>' in this spec",
        ),
        ({"shuffle_gb": 2}, "data.shuffle_gb is 10.0 in the checkpoint, 2.0 in this spec"),
        (
            {"sources": SOURCES[:1]},
            "the number of data.sources is 2 in the checkpoint, 1 in this spec",
        ),
        (
            {"sources": [{"path": "/data/c"}, SOURCES[1]]},
            "data.sources.0.path is '/data/a.parquet' in the checkpoint, '/data/c' in this spec",
        ),
        (
            {"sources": [SOURCES[0], {**SOURCES[1], "text": "title"}]},
            "data.sources.1.text is 'content' in the checkpoint, 'title' in this spec",
        ),
        (
            {"sources": [{**SOURCES[0], "weight": 2}, SOURCES[1]]},
            "data.sources.0.weight is None in the checkpoint, 2.0 in this spec",
        ),
        ({"sources": [SOURCES[0], {**SOURCES[1], "region": "eu-1"}]}, None),
        ({"bad_records": 0.5}, None),
    ],
    ids=str,
)
def test_loading_everything_needs_the_same_tokens_in_the_same_order(
    change: dict[str, Any], why: str | None
) -> None:
    saved, here = _saved_with(300, **DATA, prepared=SETS), _spec(data={**DATA, **change})
    assert mismatches(here, saved, InitPart.EVERYTHING) == ([] if why is None else [why + REMEDY])
    assert mismatches(here, saved, InitPart.MODEL) == []


def test_of_prepared_sources_the_tokens_are_compared_and_not_their_places() -> None:
    saved = _saved_with(300, **DATA, prepared=SETS)
    moved = {"tokenizer": "/b", "sources": [{"path": "/c"}, {"path": "/d"}], "prepared": SETS}
    assert mismatches(_spec(data=moved), saved, InitPart.EVERYTHING) == []
    changed = _spec(data={**DATA, "prepared": [SETS[0], _token_set("d")]})
    theirs, ours = "b" * 32, "d" * 32
    assert mismatches(changed, saved, InitPart.EVERYTHING) == [
        f"the digest of the tokens of data.sources.1 is {theirs!r} in the checkpoint, {ours!r} in "
        f"this spec{REMEDY}"
    ]
