"""Specs that bring a program: what is accepted, and what is refused with a way out."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_service.errors import InvalidSpec
from holdfast_service.job_model.job_spec import JobSpec, parse

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


def test_sections_of_built_in_models_do_not_concern_a_program() -> None:
    spec_of(
        command="x",
        parallel={"dp_replicate": 2, "dp_shard": 64},  # more ranks than micro-batches
        model={"dim": 130, "heads": 4},
        train={"steps": 1, "global_batch": 17, "schedule": {"warmup_steps": 20}},
        data={"source": "/nowhere"},
        checkpoint={"remote": {"every_steps": 10}},
    )


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
