"""A spec with `model.from`: what is known of it before its folder is read, and afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_service.errors import InvalidSpec
from holdfast_service.job_model.init_from import SavedCheckpoint, mismatches, part_to_load
from holdfast_service.job_model.job_spec import JobSpec, parse, prepared_faults
from holdfast_service.job_model.model_memory import shapes_of
from holdfast_service.job_model.node_needs import needs_of
from holdfast_service.job_model.preparation import (
    WeightsProgress,
    place_faults,
    weights_request,
    with_weights,
)
from holdfast_service.job_model.program_faults import known_fields, used_fields
from holdfast_service.job_model.replay import ReplayMark, replay_document
from holdfast_workers.protocol.messages import InitPart
from holdfast_workers.published.model_config import read_config
from holdfast_workers.spec import OF_PUBLISHED, ModelSpec, PublishedSpec

FOLDER = "/models/qwen2-tiny"
CONFIG: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 320,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
}
DOCUMENT: dict[str, Any] = {
    "name": "tuned",
    "model": {"from": FOLDER},
    "data": {"sources": [{"path": "/data/a.jsonl"}]},
}
PUBLISHED = PublishedSpec(
    uri=f"/store/weights/{'1' * 32}",
    digest="1" * 32,
    manifest_bytes=900,
    nbytes=4_000,
    dtype="bfloat16",
    positions=512,
)


def read_with(**config: Any) -> WeightsProgress:
    """A folder with this configuration, which is read."""
    found = read_config({**CONFIG, **config})
    return WeightsProgress(FOLDER, fields=dict(found.fields), published=PUBLISHED)


def spec_of(**changes: Any) -> JobSpec:
    """As it is stored before its folder is read."""
    return parse({**DOCUMENT, **changes}, None)


def known(spec: JobSpec, **config: Any) -> JobSpec:
    model = with_weights(spec.model, read_with(**config))
    assert model is not None
    return spec.model_copy(update={"model": model})


def paths(spec: JobSpec) -> list[str]:
    return [fault.path for fault in prepared_faults(spec)]


def test_the_tokenizer_is_the_folder_s_unless_the_author_names_one() -> None:
    assert spec_of().data.tokenizer == FOLDER
    named = {**DOCUMENT["data"], "tokenizer": "/tokenizers/own"}
    assert spec_of(data=named).data.tokenizer == "/tokenizers/own"
    default = {**DOCUMENT["data"], "tokenizer": "bytes"}
    assert spec_of(data=default).data.tokenizer == FOLDER, "as in the spec of another job"
    moved = {**spec_of().model_dump(mode="json"), "model": {"from": "/models/other"}}
    assert parse(moved, None).data.tokenizer == FOLDER, "it is decided once"
    assert parse({"name": "x", "data": DOCUMENT["data"]}, None).data.tokenizer == "bytes"


def test_no_size_is_judged_or_shown_before_the_folder_is_read() -> None:
    limits: dict[str, Any] = {
        "parallel": {"tp": 3, "dp_shard": 2, "vocabulary_parallel": True},
        "resources": {"memory_per_worker_bytes": 1, "workers_per_node": 3},
    }
    spec = spec_of(**limits)
    assert spec.mesh_limits.memory_of(spec.parallel.mesh) is None
    assert needs_of(spec).ram_bytes in (0, None)
    assert (spec.vocabulary, paths(spec)) == (None, [])
    for shown in (known_fields(spec), used_fields(spec)):
        assert set(shown["model"]).isdisjoint(OF_PUBLISHED)
        assert shown["model"]["from"] == FOLDER
        assert parse(shown, None) == spec
    assert {"parallel.tp", "resources.memory_per_worker_bytes"} <= {*paths(known(spec))}


def test_an_elastic_job_is_judged_on_each_of_its_meshes_once_the_sizes_are_known() -> None:
    elastic: dict[str, Any] = {
        "parallel": {"dp_shard": "auto"},
        "resources": {"nodes": {"min": 1, "max": 2}, "memory_per_worker_bytes": 1_000},
    }
    spec = spec_of(**elastic)
    assert [shape.nodes for shape in spec.shapes] == [2, 1]
    assert "resources.nodes.min" in paths(known(spec))


@given(
    layers=st.integers(1, 10_000),
    heads=st.sampled_from([1, 2, 4, 8]),
    tied=st.booleans(),
    window=st.none() | st.integers(1, 10_000),
    theta=st.floats(1, 1e9),
    vocabulary=st.integers(1, 10**6),
)
def test_all_that_a_configuration_determines_is_the_folder_s_and_the_rest_the_author_s(
    layers: int, heads: int, tied: bool, window: int | None, theta: float, vocabulary: int
) -> None:
    config = {
        "num_hidden_layers": layers,
        "num_key_value_heads": heads,
        "num_attention_heads": 8,
        "tie_word_embeddings": tied,
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": 0,
        "rope_theta": theta,
        "vocab_size": vocabulary,
    }
    spec = spec_of(model={"from": FOLDER, "sequence_length": 64, "dtype": "bfloat16"})
    model = known(spec, **config).model
    assert (model.layers, model.kv_heads, model.vocabulary) == (layers, heads, vocabulary)
    assert (model.tied_embeddings, model.sliding_window, model.rope_theta) == (tied, window, theta)
    others = {*ModelSpec.model_fields} - {*OF_PUBLISHED, "published"}
    assert model.model_dump(include=others) == spec.model.model_dump(include=others)
    with_sizes = PUBLISHED.model_copy(update={"sizes": model.sizes_digest})
    assert (model.published, model.has_sizes) == (with_sizes, True)


@pytest.mark.parametrize("name", OF_PUBLISHED)
def test_sizes_that_are_not_those_of_the_folder_are_refused(name: str) -> None:
    document = known(spec_of()).model_dump(mode="json")
    assert paths(parse(document, None)) == []
    others: dict[str, Any] = {
        **{"qkv_bias": False, "qk_norm": True, "tied_embeddings": False},
        **{"sliding_window": 7, "rope_scaling": {"type": "linear", "factor": 2.0}},
        **{"norm_eps": 0.5, "rope_theta": 5.0, "head_size": 24, "vocabulary": 1_000_000},
    }
    before = document["model"][name]
    document["model"][name] = other = others.get(name, 2 * (before or 1))
    if other == before:
        document["model"][name] = not before
    with pytest.raises(InvalidSpec) as refused:
        parse(document, None)
    assert "model.published" in {fault["path"] for fault in refused.value.faults}


def test_a_function_has_no_published_weights() -> None:
    with pytest.raises(InvalidSpec) as refused:
        parse({"name": "x", "function": "a:b", "model": {"from": FOLDER}}, None)
    (fault,) = refused.value.faults
    assert fault["path"] == "model.from" and "`config`" in fault["message"]


def test_the_spec_with_the_weights_is_one_that_may_be_submitted_again() -> None:
    spec = known(spec_of(), rope_scaling={"type": "linear", "factor": 2.0})
    document = spec.model_dump(mode="json")
    assert document["model"]["from"] == FOLDER
    assert parse(document, None) == spec
    assert weights_request(spec, "/store/weights") is None
    replay = parse(replay_document(spec, ReplayMark("a", 9), (), None), None)
    assert replay.model == spec.model
    assert used_fields(spec)["model"]["dim"] == 32


def test_the_weights_that_the_server_adds_do_not_make_a_spec_too_large() -> None:
    filler = {"a": ""}
    room = 2**16 - len(spec_of(config=filler).model_dump_json()) - 20
    spec = known(spec_of(config={"a": "x" * room}))
    assert len(spec.model_dump_json()) > 2**16
    assert parse(spec.model_dump(mode="json"), None) == spec


@pytest.mark.parametrize(
    ("sequence_length", "tokens", "path", "said"),
    [
        (513, 300, "model.sequence_length", "longer than the 512 positions"),
        (512, 321, "model.vocabulary", "has 321 tokens, and the model knows 320"),
    ],
)
def test_a_spec_that_does_not_fit_the_folder_has_a_fault_once_it_is_read(
    sequence_length: int, tokens: int, path: str, said: str
) -> None:
    spec = spec_of(model={"from": FOLDER, "sequence_length": sequence_length})
    source = spec.data.sources[0]
    made = {
        "uri": f"/store/tokens/{'2' * 32}",
        "origin": spec.data.origin_of(source),
        "digest": "2" * 32,
        "vocabulary": tokens,
        "tokens": 9,
    }
    data = {**spec.data.model_dump(mode="json"), "prepared": [made]}
    spec = parse(
        {**spec.model_dump(mode="json"), "data": data, "model": spec.model.model_dump()}, None
    )
    (fault,) = prepared_faults(known(spec))
    assert fault.path == path
    assert said in fault.message


def test_weights_elsewhere_than_those_of_the_job_are_refused() -> None:
    store = {"checkpoint": {"remote": {"uri": "/store"}}}
    spec = known(spec_of(**store))
    assert place_faults(spec, Path("/data")) == []
    for uri in (f"/etc/{'1' * 32}", "/store/weights/x", f"/store/weights/../{'1' * 32}"):
        published = PUBLISHED.model_copy(update={"uri": uri})
        model = spec.model.model_copy(update={"published": published})
        (fault,) = place_faults(spec.model_copy(update={"model": model}), Path("/data"))
        assert fault.path == "model.published.uri"
        assert "no set of weights below /store/weights" in fault.message


@pytest.mark.parametrize("name", ["dim", "qk_norm", "vocabulary"])
def test_a_field_that_the_folder_determines_is_refused_beside_it(name: str) -> None:
    with pytest.raises(InvalidSpec) as refused:
        spec_of(model={"from": FOLDER, name: True if name == "qk_norm" else 64})
    (fault,) = refused.value.faults
    assert fault["path"] == f"model.{name}"


@pytest.mark.parametrize(
    ("written", "path", "said"),
    [
        ({"from": 5}, "model.from", "should be a valid string"),
        ({"from": "models/a"}, "model.from", "is not an absolute path"),
        ({"fron": FOLDER}, "model.fron", "did you mean 'from'?"),
    ],
)
def test_the_key_from_has_its_name_in_faults(written: Any, path: str, said: str) -> None:
    with pytest.raises(InvalidSpec) as refused:
        spec_of(model=written)
    (fault,) = refused.value.faults
    assert (fault["path"], said in fault["message"]) == (path, True)


def saved(spec: JobSpec) -> SavedCheckpoint:
    return SavedCheckpoint(6, shapes_of(spec), spec.training().model_dump(mode="json"))


def test_a_run_goes_on_from_one_of_the_same_folder_with_everything() -> None:
    """The other's sizes are known, and its own only once the folder is read."""
    start = {"init_from": "a/6"}
    before, unread = known(spec_of(**start)), spec_of(**start, model={"from": f"{FOLDER}//"})
    assert part_to_load(unread, saved(before)) is InitPart.EVERYTHING
    assert part_to_load(known(unread), saved(before)) is InitPart.EVERYTHING
    for part in InitPart:
        assert mismatches(unread, saved(before), part) == []
        assert mismatches(known(unread), saved(before), part) == []
    (why,) = mismatches(known(unread, rope_theta=7.0), saved(before), InitPart.EVERYTHING)
    assert why.startswith("model.rope_theta is 10000.0 in the checkpoint, 7.0 in this spec: ")


def test_a_checkpoint_of_another_model_gives_its_weights_if_they_fit() -> None:
    start = {"init_from": "a/6"}
    other = known(spec_of(**start, model={"from": "/models/other"}))
    assert part_to_load(spec_of(**start), saved(other)) is InitPart.MODEL
    (why,) = mismatches(spec_of(**start), saved(other), InitPart.MODEL)
    assert why.startswith("model.from is /models/other in the checkpoint, /models/qwen2-tiny in ")
    chosen = spec_of(init_from={"from": "a/6", "what": "model"})
    assert mismatches(chosen, saved(other), InitPart.MODEL) == []
    assert mismatches(known(spec_of(**start)), saved(other), InitPart.MODEL) == []
    larger = known(spec_of(**start, model={"from": "/models/other"}), vocab_size=400)
    (why,) = mismatches(known(spec_of(**start)), saved(larger), InitPart.MODEL)
    assert why == (
        "the vocabulary has 400 tokens in the checkpoint, 320 in this spec: use the model of the "
        "checkpoint"
    )


LIBRARY: dict[str, Any] = {"from": FOLDER, "family": "transformers"}
GPT2: dict[str, Any] = {"model_type": "gpt2", "n_layer": 2}


def library_spec(config: dict[str, Any] = GPT2, **changes: Any) -> JobSpec:
    """Of a folder of the family transformers, which is read."""
    published = PUBLISHED.model_copy(update={"positions": None, "config": config})
    progress = WeightsProgress(FOLDER, fields={"vocabulary": 320}, published=published)
    spec = spec_of(model=LIBRARY, **changes)
    model = with_weights(spec.model, progress)
    assert model is not None
    return spec.model_copy(update={"model": model})


def test_of_a_library_s_model_the_configuration_is_kept_in_the_spec() -> None:
    spec = library_spec()
    assert prepared_faults(spec) == []
    assert spec.model.published is not None and spec.model.published.config == GPT2
    assert spec.vocabulary == 320
    assert parse(spec.model_dump(mode="json"), None) == spec
    assert spec.mesh_limits.memory is None
    request = weights_request(spec_of(model={**LIBRARY, "dtype": "bfloat16"}), "/store")
    assert request is not None
    assert (request.family, request.dtype) == ("transformers", "bfloat16")
    other = weights_request(spec_of(model=LIBRARY), "/store")
    assert other is not None and other.name != request.name


def test_a_library_s_configuration_that_is_not_that_of_the_folder_is_refused() -> None:
    document = library_spec().model_dump(mode="json")
    for config in ({**GPT2, "n_layer": 3}, None):
        document["model"]["published"]["config"] = config
        with pytest.raises(InvalidSpec) as refused:
            parse(document, None)
        assert "model.published" in {fault["path"] for fault in refused.value.faults}


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"parallel": {"tp": 2}}, "parallel.tp"),
        ({"parallel": {"cp": 2, "dp_shard": 2}}, "parallel.cp"),
        ({"model": {**LIBRARY, "dim": 64}}, "model.dim"),
        ({"model": {**LIBRARY, "compile": True}}, "model.compile"),
        ({"model": {"family": "transformers"}}, "model.from"),
    ],
    ids=str,
)
def test_what_a_library_s_model_cannot_have_is_refused_at_once(
    change: dict[str, Any], path: str
) -> None:
    with pytest.raises(InvalidSpec) as refused:
        spec_of(**{"model": LIBRARY, **change})
    assert path in {fault["path"] for fault in refused.value.faults}


def test_a_library_s_model_continues_from_one_with_the_same_configuration() -> None:
    before = library_spec(train={"steps": 60}).training().model_dump(mode="json")
    saved = SavedCheckpoint(5, {"transformer.wte.weight": (320, 64)}, before)
    changes: dict[str, Any] = {"init_from": "a/5", "train": {"steps": 60}}
    same, other = (library_spec(each, **changes) for each in (GPT2, {**GPT2, "n_head": 3}))
    assert part_to_load(same, saved) is InitPart.EVERYTHING
    assert mismatches(same, saved, InitPart.EVERYTHING) == []
    assert mismatches(other, saved, InitPart.MODEL) == []
    assert mismatches(other, saved, InitPart.EVERYTHING) == [
        "n_head of the model's config.json is None in the checkpoint, 3 in this spec: make it the "
        "same, or set `what: model`"
    ]
