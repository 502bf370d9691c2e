"""Specs that bring a program: what is accepted, and what is refused with a way out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from holdfast_service.errors import InvalidSpec
from holdfast_service.job_model.job_spec import JobSpec, parse
from holdfast_service.job_model.program_faults import BROUGHT, PROGRAMS, UNUSED, used_fields
from holdfast_service.job_model.program_levels import Brings
from holdfast_workers.spec import MESH_AXES

CODE = f"sha256:{0:064}"


def spec_of(**keys: Any) -> JobSpec:
    return parse({"name": "x", **keys}, None)


def faults(**keys: Any) -> dict[str, str]:
    with pytest.raises(InvalidSpec) as refused:
        spec_of(**keys)
    return {fault["path"]: fault["message"] for fault in refused.value.faults}


@pytest.mark.parametrize(
    "keys",
    [
        {"script": "train.py --lr 3e-4", "code": CODE},
        {"script": "src/train.py 'two words'", "code": CODE},
        {"script": "-m package.module --lr 1"},
        {"command": "bash -c 'exec python train.py'"},
        {"ray_train": "my_module:train_loop_per_worker", "config": {"lr": 1}},
    ],
)
def test_a_program_is_a_sufficient_spec(keys: dict[str, Any]) -> None:
    spec = spec_of(**keys, parallel={"dp_shard": 4}, resources={"workers_per_node": 2})
    assert spec.brings_program and (spec.parallel.world_size, spec.nodes) == (4, 2)


@pytest.mark.parametrize(
    ("keys", "path", "told"),
    [
        ({"script": "train.py"}, "code", "set `code` to the folder"),
        ({"script": "train.py 'a", "code": CODE}, "script", "check its quotes"),
        ({"script": " ", "code": CODE}, "script", "it is empty"),
        ({"script": "python train.py", "code": CODE}, "script", "begin with the file"),
        ({"script": "--lr 1", "code": CODE}, "script", "begin with the file"),
        ({"script": "/opt/train.py", "code": CODE}, "script", "outside of the code folder"),
        ({"script": "a/../../train.py", "code": CODE}, "script", "outside of the code folder"),
        ({"script": "-m train.py;x"}, "script", "after -m comes the name of a module"),
        ({"command": ""}, "command", "it is empty"),
        ({"command": 'echo "'}, "command", "check its quotes"),
        ({"command": "echo a\0"}, "command", "NUL"),
        ({"ray_train": "train"}, "ray_train", "package.module:name"),
        ({"function": "a:b", "command": "x"}, "command", "either function or command"),
        ({"script": "-m x", "ray_train": "a:b"}, "ray_train", "either script or ray_train"),
        ({"command": "x", "recipe": "my:Recipe"}, "recipe", "either a recipe or a command"),
        ({"command": "x", "program": {"metrics": "("}}, "program.metrics", "regular expression"),
        ({"command": "x", "program": {"grace_s": 121}}, "program.grace_s", "equal to 120"),
        ({"command": "x", "program": {"preload": ["a b"]}}, "program.preload.0", "import"),
        (
            {"ray_train": "a:b", "ray_run": {"datasets": "my_module"}},
            "ray_run.datasets",
            "package.module:name",
        ),
        (
            {"ray_train": "a:b", "ray_run": {"storage_path": "s3://bucket/runs"}},
            "ray_run.storage_path",
            "name one that all nodes share",
        ),
        ({"command": "x", "program": {"event_files": "../a"}}, "program.event_files", "below it"),
        ({"command": "x", "program": {"context": True}}, "program.context", "name a `script`"),
        (
            {"script": "a.py", "code": CODE, "program": {"context": True, "fork": False}},
            "program.context",
            "remove `program.fork: false`",
        ),
        (
            {"script": "a.py", "code": CODE, "program": {"context": True, "steps": 1000}},
            "program.steps",
            "set train.steps",
        ),
        ({"command": "x", "init_from": "job/3"}, "init_from", "name one in its arguments"),
    ],
)
def test_a_fault_is_told_with_its_path_and_a_way_out(
    keys: dict[str, Any], path: str, told: str
) -> None:
    assert told in faults(**keys)[path]


@pytest.mark.parametrize("axis", ["pp", "cp", "tp"])
def test_a_program_divides_its_model_itself(axis: str) -> None:
    found = faults(command="x", parallel={axis: 2}, resources={"workers_per_node": 2})
    assert list(found) == [f"parallel.{axis}"] and "set dp_shard" in found[f"parallel.{axis}"]


def test_the_defaults_of_built_in_models_do_not_concern_a_program() -> None:
    spec = spec_of(command="x", parallel={"dp_replicate": 2, "dp_shard": 64})  # > micro-batches
    assert parse(spec.model_dump(mode="json"), None) == spec, "a stored spec has all fields"


KEYS: dict[Brings, dict[str, Any]] = {
    Brings.RECIPE: {},
    Brings.FUNCTION: {"function": "a:b"},
    Brings.SCRIPT: {"script": "train.py", "code": CODE},
    Brings.COMMAND: {"command": "x"},
    Brings.RAY_TRAIN: {"ray_train": "a:b"},
}
USED_BY_PROGRAMS = {
    *BROUGHT,
    *("recipe", "name", "labels", "priority", "code", "env", "runtime_env", "resources"),
    *("recovery", "program", "ray_run", "config"),
    *(f"parallel.{axis}" for axis in MESH_AXES),  # judged by their sizes
    *("checkpoint.memory", "checkpoint.final_save_s"),
    *(f"checkpoint.remote.{place}" for place in ("uri", "endpoint", "region", "secret")),
    *("detection.enabled", "detection.hang_floor_s", "detection.hang_factor"),
    *("detection.first_limit_s", "detection.stall_limit_s", "detection.replace_stragglers"),
    "detection.straggler_patience_s",
    *(f"timeouts.{name}" for name in ("install_s", "start_s", "form_s", "finish_s")),
}


def leaves(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from leaves(kind, f"{prefix}{name}.")
        else:
            yield prefix + name


def is_below(path: str, tops: Iterable[str]) -> bool:
    return any(f"{path}.".startswith(f"{top}.") for top in tops)


def test_every_field_is_used_by_programs_or_refused() -> None:
    """A new field belongs into the table of unused fields, or into the set above."""
    unused = {path for each in UNUSED if each.kinds >= PROGRAMS for path in each.paths}
    for path in leaves(JobSpec):
        assert is_below(path, unused) != is_below(path, USED_BY_PROGRAMS), path


CHANGED: dict[str, Any] = {
    "guards": {"max_skips": 3},
    "checks": {"replica_digest_every_steps": 2},
    "checkpoint.digest_every_steps": 5,
    "model": {"dim": 256},
    "data": {"source": "/data"},
    "data.sources": [{"path": "/data"}],
    "data.validation": {"share": 0.1},
    "evaluate": {"every_steps": 10},
    "data.tokenizer": "/models/a",
    "data.document_end": "<|endoftext|>",
    "data.bad_records": 0.5,
    "data.shuffle_gb": 1,
    "data.prepared": [
        {"uri": "/sets", "origin": "a", "digest": "0" * 32, "vocabulary": 256, "tokens": 1}
    ],
    "data.special_tokens": {"pad": {"id": 3}},
    "train": {"steps": 10},
    "parallel.zero": 1,
    "parallel.context_method": "ring",
    "parallel.schedule": "gpipe",
    "parallel.stages_per_rank": 2,
    "parallel.sequence_parallel": True,
    "parallel.vocabulary_parallel": True,
    "checkpoint.remote.every_steps": 10,
    "checkpoint.remote.keep": 7,
    "checkpoint.remote.keep_every": 7,
    "checkpoint.remote.keep_best": {"n": 2},
    "checkpoint.overhead_target": 0.5,
    "timeouts.load_s": 60,
    "timeouts.save_s": 60,
    "timeouts.publish_s": 60,
    "timeouts.first_step_s": 60,
    "detection.limits": {"forward": 3.0},
    "detection.collective_timeout_s": 60,
    "init_from": "job/3",
    "config": {"lr": 1},
    "ray_run": {"num_to_keep": 1},
    "program": {"steps": 3},
    "program.preload": ["numpy"],
}


@pytest.mark.parametrize("kind", list(Brings))
def test_a_field_without_effect_is_refused_with_a_way_out(kind: Brings) -> None:
    for each in UNUSED:
        for path in each.paths if kind in each.kinds else ():
            value = CHANGED[path]
            for part in reversed(path.split(".")):
                value = {part: value}
            found = faults(**KEYS[kind], **value)
            assert found[path] == each.instead
            assert any(word in each.instead for word in ("remove it", "set these", "or train in"))


@pytest.mark.parametrize("kind", list(Brings))
def test_a_resolved_spec_has_the_fields_of_its_code_and_is_a_spec_again(kind: Brings) -> None:
    spec = spec_of(**KEYS[kind])
    document = used_fields(spec)
    assert parse(document, None) == spec
    assert ("model" in document) is (not kind.is_program)
    assert ("recipe" in document) is (kind is Brings.RECIPE)
    assert ("program" in document) is kind.is_program
    assert [name for name in BROUGHT if name in document] == [*KEYS[kind].keys() & {*BROUGHT}]


def test_an_unused_field_beside_a_program_that_cannot_be_read_is_not_judged() -> None:
    assert list(faults(command='echo "', program={"steps": 3})) == ["command"]


def test_an_elastic_program_may_have_any_number_of_ranks() -> None:
    spec = spec_of(
        command="x", parallel={"dp_shard": "auto"}, resources={"nodes": {"min": 1, "max": 64}}
    )
    assert [shape.world_size for shape in spec.shapes] == list(range(64, 0, -1))
    order = spec.mesh_order()
    assert order is not None and "50% of the fastest" in order.legal[32].why


def test_the_meshes_of_a_program_have_no_schedule() -> None:
    nodes = {"min": 1, "max": 2, "schedule": [{"after_step": 0, "mesh": {"dp_shard": 1}}]}
    found = faults(command="x", parallel={"dp_shard": "auto"}, resources={"nodes": nodes})
    assert "remove the schedule" in found["resources.nodes.schedule"]


def test_a_line_may_be_a_text_or_a_list_of_words() -> None:
    words = ["train.py", "two words", "it's", ""]
    text = "train.py 'two words' \"it's\" ''"
    assert spec_of(script=words, code=CODE).script == tuple(words)
    assert spec_of(script=text, code=CODE).model_dump(mode="json")["script"] == words


@given(
    st.text(max_size=40) | st.lists(st.text(max_size=9), max_size=3),
    st.sampled_from(["script", "command", "ray_train"]),
)
def test_any_line_is_accepted_or_refused_with_a_message(line: str | list[str], key: str) -> None:
    try:
        spec_of(**{key: line, "code": CODE})
    except InvalidSpec as refused:
        assert all(fault["path"] and fault["message"] for fault in refused.faults)
