"""The section `data` of a spec: what is accepted, and each fault with the whole sentence."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast_service.errors import InvalidSpec
from holdfast_service.job_model.job_spec import JobSpec, parse, prepared_faults
from holdfast_service.job_model.model_memory import memory_model
from holdfast_workers.spec import DataSpec, SourceSpec

DIGEST = "0123456789abcdef" * 2
WEB = {"path": "s3://lab/web/*.parquet", "text": "content"}
CODE = {"path": "/data/code/**/*.jsonl.zst"}
TOKENIZER = "/models/qwen/tokenizer.json"


HELD_OUT: dict[str, Any] = {"path": "s3://lab/held-out.parquet", "text": "content"}


def prepared(
    source: dict[str, Any], vocabulary: int = 1000, tokenizer: str = TOKENIZER
) -> dict[str, Any]:
    """The token set of a source."""
    made = SourceSpec.model_validate(source)
    return {
        "uri": "s3://lab/sets/a",
        "origin": DataSpec(tokenizer=tokenizer).origin_of(made),
        "digest": DIGEST,
        "vocabulary": vocabulary,
        "tokens": 10,
    }


OF_ITS_OWN: dict[str, Any] = {**HELD_OUT, "prepared": {**prepared(HELD_OUT), "digest": "1" * 32}}


def of_share(share: float, held_out: int) -> dict[str, Any]:
    """The token set of CODE without a share of its documents."""
    data = DataSpec.model_validate({"sources": [CODE], "validation": {"share": share}})
    origin = data.origin_of(data.sources[0])
    return {**prepared(CODE, 256, "bytes"), "origin": origin, "held_out": held_out}


def validated_with(tokenizer: str, end: int) -> dict[str, Any]:
    """Token sets of WEB, and of validation by a tokenizer that is perhaps another one."""
    apart = {**prepared(HELD_OUT), "digest": "1" * 32, "tokenizer": tokenizer, "document_end": end}
    return {
        "sources": [WEB],
        "prepared": [{**prepared(WEB), "tokenizer": DIGEST, "document_end": 5}],
        "tokenizer": TOKENIZER,
        "validation": {**HELD_OUT, "prepared": apart},
    }


def document(**data: Any) -> dict[str, Any]:
    return {"name": "x", "data": data}


def faults(spec: dict[str, Any]) -> list[tuple[str, str]]:
    with pytest.raises(InvalidSpec) as refused:
        parse(spec, None)
    return [(fault["path"], fault["message"]) for fault in refused.value.faults]


@pytest.mark.parametrize(
    "data",
    [
        {"source": "python-stdlib", "tokenizer": "bytes", "sources": [CODE]},
        {"sources": [{**WEB, "weight": 0.7}, {**CODE, "weight": 0.3}], "tokenizer": TOKENIZER},
        {"sources": [{**WEB, "weight": 1}] * 2},
        {"sources": [WEB, {**WEB, "text": "title"}], "document_end": None},
        {"sources": [WEB], "tokenizer": TOKENIZER, "document_end": "<|endoftext|>"},
        {"sources": [WEB, CODE], "bad_records": 0, "shuffle_gb": 0.5, "tokenizer": TOKENIZER},
        {
            "sources": [WEB, CODE],
            "tokenizer": TOKENIZER,
            "prepared": [prepared(WEB), prepared(CODE)],
        },
        {"sources": [WEB, CODE], "validation": {"share": 0.01}},
        {"sources": [WEB, CODE], "validation": {"path": "/data/held-out.parquet", "text": "body"}},
        {
            "sources": [WEB],
            "tokenizer": TOKENIZER,
            "validation": OF_ITS_OWN,
            "prepared": [prepared(WEB)],
        },
        {
            "sources": [
                {"path": "s3://lab"},
                {"path": "s3://lab/a?[0-9]/b#%00"},
                {"path": "/ä b"},
            ]
        },
        {
            "sources": [
                {**WEB, "endpoint": "https://s3.example.com", "region": "eu-1", "secret": "lab"}
            ]
        },
    ],
    ids=str,
)
def test_a_spec_with_sources_is_accepted_also_with_all_defaults_written_out(
    data: dict[str, Any],
) -> None:
    spec = parse(document(**data), None)
    assert parse(spec.model_dump(mode="json"), None) == spec


WITHOUT_SOURCES = (
    "{0} has an effect on `sources` only, and there are none: name the files in `sources` in place "
    "of `source`, or remove {0}"
)
NO_TOKENIZER = (
    ": write `bytes`, or the absolute path of a tokenizer.json or of the folder of a model with "
    "one, which every node can read"
)
NO_PATH = ": write an absolute path that every node can read, or s3://bucket/prefix"
ONE_OF = "name either the files of validation by `path`, or a `share` of the sources"
WITH_PATH = "{} has an effect with `path` only: remove it, or `share`"
TRAINED = (
    "source 0 has the same {}, and would be trained on: name other files, or a `share` of the "
    "sources"
)
PREPARE = "remove `prepared`, and the server prepares the sources"


@pytest.mark.parametrize(
    ("data", "path", "message"),
    [
        *(
            ({name: value}, f"data.{name}", WITHOUT_SOURCES.format(name))
            for name, value in {
                "tokenizer": TOKENIZER,
                "document_end": "<|endoftext|>",
                "bad_records": 0.5,
                "shuffle_gb": 1,
                "validation": {"share": 0.1},
                "prepared": [prepared(WEB)],
            }.items()
        ),
        (
            {"source": "/data", "sources": [CODE]},
            "data.source",
            "a job reads either `source` or `sources`: remove one of them",
        ),
        *(
            ({"tokenizer": text, "sources": [CODE]}, "data.tokenizer", f"{text!r} {why}")
            for text, why in {
                "gpt2": f"is not an absolute path{NO_TOKENIZER}",
                "": f"is not an absolute path{NO_TOKENIZER}",
                "s3://lab/tokenizer.json": f"is not an absolute path{NO_TOKENIZER}",
                "/models/a\n": f"has a control character{NO_TOKENIZER}",
            }.items()
        ),
        (
            {"document_end": "<|endoftext|>", "sources": [CODE]},
            "data.document_end",
            "the tokenizer `bytes` ends each document with a zero byte: remove document_end, or "
            "set a tokenizer that has this token",
        ),
        (
            {"document_end": "", "sources": [CODE], "tokenizer": TOKENIZER},
            "data.document_end",
            "it is empty: write a token of the tokenizer, or null for its `eos_token`",
        ),
        *(
            ({"sources": [CODE, {"path": text}]}, "data.sources.1.path", f"{text!r} {why}")
            for text, why in {
                "code/*.jsonl": f"is not an absolute path{NO_PATH}",
                "": f"is not an absolute path{NO_PATH}",
                "~/data": f"is not an absolute path{NO_PATH}",
                "file:///data": f"is not an absolute path{NO_PATH}",
                "gs://lab/web": f"is not an absolute path{NO_PATH}",
                "/data/a\t": f"has a control character{NO_PATH}",
                "s3://": "cannot be read: it has no bucket: write s3://bucket/prefix",
                "s3:///web": "cannot be read: it has no bucket: write s3://bucket/prefix",
                "s3://*/web": "cannot be read: '*' is not a bucket's name: use a-z, 0-9, . and -",
                "s3://a b/web": "cannot be read: 'a b' is not a bucket's name: use a-z, 0-9, . and "
                "-",
                "s3://lab/a\n": f"has a control character{NO_PATH}",
            }.items()
        ),
        (
            {"sources": [{**CODE, "text": ""}]},
            "data.sources.0.text",
            "it is empty: write the name of the column, or key, with a document's text",
        ),
        *(
            (
                {"sources": [WEB, {**CODE, name: value}]},
                f"data.sources.1.{name}",
                f"{name} needs a bucket: set path to s3://bucket/prefix, or remove {name}",
            )
            for name, value in {
                "endpoint": "https://s3.example.com",
                "region": "eu-1",
                "secret": "lab",
            }.items()
        ),
        (
            {"sources": [{**WEB, "endpoint": "https://s3.example.com"}]},
            "data.sources.0.secret",
            "an endpoint needs a secret: the server's own credentials are for AWS only",
        ),
        (
            {"sources": [{**WEB, "endpoint": "s3.example.com", "secret": "lab"}]},
            "data.sources.0.endpoint",
            "'s3.example.com' is not a URL: write https://host or http://host:port",
        ),
        (
            {"sources": [{**WEB, "region": "eu 1"}]},
            "data.sources.0.region",
            "'eu 1' is not a region: write its name, such as us-east-1",
        ),
        (
            {"sources": [{**WEB, "weight": 0.5}, CODE, {**CODE, "text": "a"}]},
            "data.sources",
            "1 of 3 sources have a weight: give one to each of them, or to none",
        ),
        (
            {"sources": [WEB, CODE, WEB]},
            "data.sources.2.path",
            "source 0 has the same path and text, and an epoch would have each of its tokens "
            "twice: remove one of them, or give each source a weight",
        ),
        (
            {"sources": [WEB, CODE], "prepared": [prepared(WEB)], "tokenizer": TOKENIZER},
            "data.prepared",
            f"its length is 1, and that of sources 2: {PREPARE}",
        ),
        (
            {
                "sources": [WEB, CODE],
                "prepared": [prepared(WEB), prepared(CODE, 7)],
                "tokenizer": TOKENIZER,
            },
            "data.prepared",
            "its token sets are of vocabularies of 7 and 1000 tokens, and a job has one tokenizer: "
            f"{PREPARE}",
        ),
        (
            {
                "sources": [WEB, CODE],
                "prepared": [prepared(WEB), {**prepared(CODE), "tokenizer": DIGEST}],
                "tokenizer": TOKENIZER,
            },
            "data.prepared",
            "the tokenizer, or its document end, was changed between the preparation of its token "
            f"sets: {PREPARE}",
        ),
        *(
            (
                validated_with(tokenizer, end),
                "data.prepared",
                "the tokenizer, or its document end, was changed between the preparation of its "
                f"token sets: {PREPARE}",
            )
            for tokenizer, end in (("f" * 32, 5), (DIGEST, 6))
        ),
        (
            {"sources": [WEB, CODE], "prepared": [prepared(WEB)] * 2, "tokenizer": TOKENIZER},
            "data.prepared.1",
            "the token set was made of another source, tokenizer or setting than those of source "
            f"1: {PREPARE}",
        ),
        (
            {"sources": [WEB], "prepared": [{**prepared(WEB, 256, "bytes"), "uri": "sets/a"}]},
            "data.prepared.0.uri",
            "'sets/a' cannot be read: use an absolute path, file:///path or s3://bucket/prefix",
        ),
        *(
            ({"sources": [WEB], "validation": validation}, f"data.validation{path}", message)
            for validation, path, message in (
                ({}, "", ONE_OF),
                ({"path": "/data/a", "share": 0.1}, "", ONE_OF),
                ({"share": 0.1, "text": "body"}, ".text", WITH_PATH.format("text")),
                ({"share": 0.1, "secret": "lab"}, ".secret", WITH_PATH.format("secret")),
                ({"path": "a.parquet"}, ".path", f"'a.parquet' is not an absolute path{NO_PATH}"),
                ({**WEB, "text": "title"}, ".path", TRAINED.format("path")),
                (
                    {"path": "/data/a", "endpoint": "https://s3.example.com"},
                    ".endpoint",
                    "endpoint needs a bucket: set path to s3://bucket/prefix, or remove endpoint",
                ),
            )
        ),
        (
            {"sources": [CODE], "validation": {"share": 0.1}, "prepared": [of_share(0.1, 0)]},
            "data.validation.share",
            "none of the sources' documents is in the share of 0.1: raise it, or name files by "
            "`path`",
        ),
        (
            {"sources": [CODE], "validation": {"share": 0.2}, "prepared": [of_share(0.1, 5)]},
            "data.prepared.0",
            "the token set was made of another source, tokenizer or setting than those of source "
            f"0: {PREPARE}",
        ),
        (
            {"sources": [WEB], "validation": HELD_OUT, "prepared": [prepared(WEB, 256, "bytes")]},
            "data.validation.prepared",
            f"the token sets of sources and validation are made together: {PREPARE}",
        ),
        (
            {
                "sources": [WEB],
                "validation": {**HELD_OUT, "prepared": prepared(HELD_OUT, 256, "bytes")},
                "prepared": [prepared(WEB, 256, "bytes")],
            },
            "data.validation.path",
            TRAINED.format("documents"),
        ),
    ],
)
def test_a_fault_is_told_with_its_path_and_a_way_out(
    data: dict[str, Any], path: str, message: str
) -> None:
    assert faults(document(**data)) == [(path, message)]


VIT = {"family": "vit", "image_size": 16, "patch_size": 4, "classes": 4}


@pytest.mark.parametrize(
    "change", [{"sources": [CODE]}, {"tokenizer": TOKENIZER}, {"shuffle_gb": 1}], ids=str
)
def test_a_model_of_images_reads_no_texts(change: dict[str, Any]) -> None:
    (name,) = change
    found = faults({"name": "x", "model": VIT, "data": {"source": "/images", **change}})
    assert found == [(f"data.{name}", f"a model of the family vit has no {name}: remove it")]


@pytest.mark.parametrize(
    "brought", [{"function": "a:b"}, {"script": "-m a", "program": {"context": True}}], ids=str
)
@pytest.mark.parametrize("change", [{"sources": [CODE, CODE]}, {"tokenizer": "gpt2"}], ids=str)
def test_a_function_is_told_that_no_tokens_are_prepared_for_it(
    brought: dict[str, Any], change: dict[str, Any]
) -> None:
    (name,) = change
    why = "a function reads its own data, and no tokens are prepared for it: remove it, and name "
    why += "the data in `config`"
    assert faults({**document(**change), **brought}) == [(f"data.{name}", why)]


def test_a_recipe_of_a_user_may_read_sources() -> None:
    spec = parse({**document(sources=[WEB], tokenizer=TOKENIZER), "recipe": "my.code:Recipe"}, None)
    assert spec.data.sources


def test_an_invalid_source_causes_no_faults_of_other_fields() -> None:
    found = faults(document(sources=[{**CODE, "weight": 0}], tokenizer=TOKENIZER, shuffle_gb=1))
    assert [path for path, _ in found] == ["data.sources.0.weight"]


def with_sets(spec: JobSpec, vocabulary: int) -> JobSpec:
    sets = [
        prepared(source.model_dump(), vocabulary, spec.data.tokenizer)
        for source in spec.data.sources
    ]
    data = {**spec.data.model_dump(), "prepared": sets}
    return JobSpec.model_validate({**spec.model_dump(mode="json"), "data": data})


def test_a_vocabulary_that_becomes_known_must_fit_the_mesh() -> None:
    parallel = {"tp": 2, "vocabulary_parallel": True}
    spec = parse({**document(sources=[WEB], tokenizer=TOKENIZER), "parallel": parallel}, None)
    assert prepared_faults(with_sets(spec, 50_256)) == []
    (fault,) = prepared_faults(with_sets(spec, 50_257))
    assert (fault.path, fault.message) == (
        "parallel.vocabulary_parallel",
        "the vocabulary of 50257 is not divisible by tp 2: use another tp, or remove "
        "vocabulary_parallel",
    )


def test_a_vocabulary_that_becomes_known_must_fit_the_memory_of_a_rank() -> None:
    spec = parse(document(sources=[WEB], tokenizer=TOKENIZER), None)
    small = spec.mesh_limits.memory_of(spec.parallel.mesh)
    assert small is not None
    limited = {**spec.model_dump(mode="json"), "resources": {"memory_per_worker_bytes": 2 * small}}
    accepted = parse(limited, None)
    assert prepared_faults(with_sets(accepted, 300)) == []
    (fault,) = prepared_faults(with_sets(accepted, 200_000))
    assert fault.path == "resources.memory_per_worker_bytes"
    assert fault.message.startswith(f"the mesh {spec.parallel.product} needs ")


def test_a_vocabulary_that_becomes_known_must_fit_each_mesh_of_an_elastic_job() -> None:
    spec = parse(
        {
            **document(sources=[WEB], tokenizer=TOKENIZER),
            "parallel": {"dp_shard": "auto", "zero": 3},
            "resources": {"nodes": {"min": 1, "max": 2}},
        },
        None,
    )
    one = memory_model(with_sets(spec, 100_000))
    assert one is not None
    largest, smallest = (
        with_sets(spec, 100_000).mesh_limits.memory_of({**spec.parallel.mesh, "dp_shard": size})
        for size in (2, 1)
    )
    assert largest is not None and smallest is not None and largest < smallest
    limited = parse(
        {
            **spec.model_dump(mode="json"),
            "resources": {
                "nodes": {"min": 1, "max": 2},
                "memory_per_worker_bytes": (largest + smallest) // 2,
            },
        },
        None,
    )
    (fault,) = prepared_faults(with_sets(limited, 100_000))
    assert (fault.path, fault.message.endswith("write min: 2")) == ("resources.nodes.min", True)


def test_the_token_sets_that_the_server_adds_do_not_make_a_spec_too_large() -> None:
    sources = [{"path": f"/data/{number}"} for number in range(64)]
    filler = parse(document(sources=sources), None)
    room = 2**16 - len(filler.model_dump_json()) - 100
    spec = parse({**document(sources=sources), "config": {"a": "x" * room}}, None)
    known = with_sets(spec, 256)
    assert len(known.model_dump_json()) > 2**16
    assert prepared_faults(known) == []
    assert parse(known.model_dump(mode="json"), None) == known
