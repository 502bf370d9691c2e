"""A hypothesis strategy for valid job specs: any value that each field's own limits allow."""

from __future__ import annotations

import types
from typing import Annotated, Any, Union, get_args, get_origin

from hypothesis import strategies as st
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from holdfast_service.job_model.job_spec import JobSpec
from holdfast_service.job_model.program_faults import UNUSED
from holdfast_service.job_model.program_levels import brings
from holdfast_workers.spec import OF_PUBLISHED, DataSpec, OptimizerSpec
from holdfast_workers.spec.optimization import OWN_FIELDS

ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
LIKE_OTHER_TYPES = st.sampled_from(
    [
        *("", "1e5", "1e-05", "1:30", "on", "no", "~", "null", "<<", "=", "2001-12-14", "0o17"),
        *("0x1F", "017", "1_000", ".inf", ".5", "*a", "&a", "{}", "[]", "- a", "a: b", "# a"),
        *("!!int 1", "\ufeff", "\x85", "\u2028", "a\n b", "\x7f"),
    ]
)
TEXT = ANY_TEXT | LIKE_OTHER_TYPES
INTEGERS = st.integers(-(2**53) + 1, 2**53 - 1)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from([1e-05, 1e16])
OWN_SETTINGS = st.recursive(
    st.none() | st.booleans() | INTEGERS | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", fullmatch=True) | st.just("1e5")
TOKENS = st.sampled_from([1, 20e9, "20e9"]) | st.integers(1, 2**53 - 1)
WEIGHTS = st.floats(1e-3, 1e6)
SETS = st.fixed_dictionaries(
    {
        "uri": st.sampled_from(["/sets/ä b", "s3://bucket/sets"]),
        "digest": st.from_regex("[0-9a-f]{32}", fullmatch=True),
        "vocabulary": st.just(512),
        "tokens": st.integers(1, 2**53 - 1),
    }
)


def _data(count: int, *, weighted: bool) -> st.SearchStrategy[dict[str, Any]]:
    """A section `data` with that many sources."""
    sources = [
        st.fixed_dictionaries(
            {
                "path": st.sampled_from([f"/data/{at} ä/*.jsonl", f"s3://bucket/{at}?/**"]),
                **({"weight": WEIGHTS} if weighted else {}),
            },
            optional={"text": TEXT.filter(bool)},
        )
        for at in range(count)
    ]
    return st.fixed_dictionaries(
        {
            "sources": st.tuples(*sources).map(list),
            "tokenizer": st.just("/models/ä/tokenizer.json"),
        },
        optional={
            "document_end": st.none() | TEXT.filter(bool),
            "bad_records": st.floats(0, 0.99),
            "shuffle_gb": st.floats(1e-3, 1e6),
            "prepared": st.just([]) | st.tuples(*[SETS] * count).map(list),
            "special_tokens": st.just({"document_end": {"id": 0}, "pad": {"id": 3, "token": "ä"}}),
        },
    ).map(_with_origins)


def _with_origins(section: dict[str, Any]) -> dict[str, Any]:
    """The section, whose token sets are those of its sources."""
    if "prepared" not in section:
        return section
    data = DataSpec.model_validate({**section, "prepared": []})
    origins = map(data.origin_of, data.sources)
    sets = [
        {**each, "origin": origin}
        for each, origin in zip(section["prepared"], origins, strict=False)
    ]
    return {**section, "prepared": sets}


RELATED: dict[str, st.SearchStrategy[Any]] = {
    # Other fields limit these.
    "labels": st.dictionaries(
        st.from_regex(r"[a-z][a-z0-9._-]{0,31}", fullmatch=True), TEXT, max_size=3
    ),
    "config": st.dictionaries(TEXT, OWN_SETTINGS, max_size=4),
    "env": st.dictionaries(st.from_regex(r"[A-Z]{1,8}_OF_USER", fullmatch=True), TEXT, max_size=3),
    "pip": st.lists(st.sampled_from(["einops>=0.8", "x @ file:///x.whl", "y[z]==1.0"]), max_size=2),
    "every_steps": st.just("auto") | st.integers(0, 2**53 - 1),
    "evaluate": st.just({}),  # it needs documents of validation
    "metric": st.sampled_from(["loss", "grad_norm"]),
    "dim": st.sampled_from([64, 128, 256]),
    "heads": st.sampled_from([2, 4]),
    "kv_heads": st.none() | st.just(2),
    "head_size": st.none() | st.sampled_from([16, 48]),
    "vocabulary": st.none() | st.integers(256, 2**40).map(lambda n: 2 * n),
    "from": st.none(),  # see `_published`
    "published": st.none(),
    "global_batch": st.integers(1, 2**40).map(lambda n: 8 * n),
    "micro_batch": st.sampled_from([1, 2, 4]),
    "dp_replicate": st.just(1),
    "dp_shard": st.sampled_from([1, 2]),
    "pp": st.just(1),
    "cp": st.just(1),
    "tp": st.sampled_from([1, 2]),
    "sequence_length": st.integers(1, 2**40).map(lambda n: 2 * n),
    "ffn_dim": st.none() | st.integers(1, 2**40).map(lambda n: 2 * n),
    "steps": st.integers(20, 2**53 - 1),
    # A spec has one of the three: see `_of_tokens`.
    "tokens": st.none(),
    "epochs": st.none(),
    "warmup_steps": st.integers(0, 20),
    "groups": st.just([]) | st.just([{"match": "*norm*", "lr_scale": 0.5}, {"match": "*"}]),
    "rollback_steps": st.just(1),
    "max_skips": st.integers(1, 100),
    "heartbeat_timeout_s": st.floats(0.2, 10),
    "lease_s": st.just(0) | st.floats(600, 86400),
    "workers_per_node": st.just(1),
    "nodes": st.none(),
    "rope_scaling": st.none(),
    "family": st.just("llama"),
    "image_size": st.none(),
    "patch_size": st.none(),
    "classes": st.none(),
    "memory_per_worker_bytes": st.none(),
    "gpus_per_worker": st.just(0) | st.just(1),
    "accelerator_type": st.none(),
    "custom": st.dictionaries(
        st.from_regex(r"[a-z]{1,8}", fullmatch=True), st.sampled_from([0.5, 1, 1.25]), max_size=2
    ),
    "node_labels": st.dictionaries(
        st.sampled_from(["disk", "example.com/rack"]),
        st.sampled_from(["nvme", "!hdd", ["1", "2"], ["!1e5"]]),
    ),
    "failure": st.none() | st.just("example.com/rack"),
    "fast": st.none() | st.just("switch"),
    "recipe": st.just("pretrain") | st.just("my.module:Recipe"),
    "function": st.none(),
    "script": st.none(),
    "storage_path": st.none() | st.sampled_from(["/shared/runs", "~/ray_results", "ä b"]),
    "command": st.none(),
    "ray_train": st.none(),
    "context": st.just(False),
    "datasets": st.none() | st.just("my.module:datasets"),
    "preload": st.lists(st.sampled_from(["torch", "transformers.models"]), max_size=2),
    "metrics": st.none() | st.just(r"step (?P<step>[0-9]+) loss (?P<loss>[-+.e0-9]+)"),
    "event_files": st.none() | st.sampled_from(["runs", "lightning_logs/version_0"]),
    "data": st.fixed_dictionaries({}, optional={"source": st.just("python-stdlib") | TEXT})
    | st.builds(_data, st.integers(1, 3), weighted=st.booleans()).flatmap(lambda drawn: drawn),
    "uri": st.none() | st.sampled_from(["/data/ä b", "file:///a%20b", "s3://bucket/prefix"]),
    "endpoint": st.none(),
    "region": st.none(),
    "secret": st.none(),
    "code": st.none(),
    "init_from": st.none() | st.just("job/3") | st.just({"from": "job", "what": "model"}),
}


PROGRAMS = st.sampled_from(
    [
        {"script": "-m my.module --lr 3e-4"},
        {"script": "train.py --name 'two words' ''", "code": f"sha256:{0:064}"},
        {"script": "-m my.module", "program": {"context": True}},
        {"command": "bash -c 'python train.py > log'"},
        {"ray_train": "my.module:train_loop"},
    ]
)


def documents() -> st.SearchStrategy[dict[str, Any]]:
    """Documents with a name and any other keys; some of elastic jobs."""
    drawn = st.builds(lambda name, keys: {**keys, "name": name}, NAMES, section(JobSpec))
    fixed = drawn.map(_combinable)
    of_tokens = st.builds(_of_tokens, fixed, TOKENS)
    any_kind = fixed | of_tokens | fixed.map(_elastic) | fixed.map(_listed)
    any_kind |= fixed.map(_published)
    return (any_kind | st.builds(_program, fixed, PROGRAMS)).map(_without_unused)


def _without_unused(document: dict[str, Any]) -> dict[str, Any]:
    """Without the fields that mean nothing for the kind of code that it brings."""
    kind = brings(document)
    paths = (path for each in UNUSED if kind in each.kinds for path in each.paths)
    for path in paths:
        if path != "program" or document.get("script") is None:
            document = _without(document, path.split("."))
    return document


def _without(document: dict[str, Any], path: list[str]) -> dict[str, Any]:
    first, *rest = path
    if rest and first in document:
        return {**document, first: _without(document[first], rest)}
    return {key: value for key, value in document.items() if key != first}


def _program(document: dict[str, Any], program: dict[str, Any]) -> dict[str, Any]:
    kept = {k: v for k, v in document.items() if k not in ("recipe", "init_from")}
    parallel = {k: v for k, v in document.get("parallel", {}).items() if k != "tp"}
    return {**kept, **program, "parallel": parallel}


def _combinable(document: dict[str, Any]) -> dict[str, Any]:
    train = dict(document.get("train", {}))
    if "optimizer" in train:
        train["optimizer"] = _optimizer(train["optimizer"])
    if "schedule" in train:
        train["schedule"] = _schedule(train["schedule"])
    if train:
        document = {**document, "train": train}
    if not document.get("parallel", {}).get("sequence_parallel"):
        return document
    return {**document, "model": {**document.get("model", {}), "compile": False}}


def _optimizer(section: dict[str, Any]) -> dict[str, Any]:
    """The section without fields that its optimizer lacks, and with a rate."""
    own = OptimizerSpec.model_validate({"name": section.get("name", "adamw"), "lr": 0.5})
    lacked = {field for field in OWN_FIELDS if getattr(own, field) is None}
    kept = {k: v for k, v in section.items() if v is not None and k not in lacked}
    if not kept.get("momentum", own.momentum):
        kept.pop("nesterov", None)
    return {"lr": own.lr, **kept}


def _schedule(section: dict[str, Any]) -> dict[str, Any]:
    """The section without fields that its schedule lacks."""
    if section.get("name") != "wsd":
        return {k: v for k, v in section.items() if k not in ("decay", "decay_share")}
    return {k: v for k, v in section.items() if v is not None} | {"warmup_steps": 0}


def _of_tokens(document: dict[str, Any], tokens: float) -> dict[str, Any]:
    """The document with tokens in place of steps."""
    if document.get("recipe", "pretrain") != "pretrain":
        return document
    train = {k: v for k, v in document.get("train", {}).items() if k != "steps"}
    schedule = {**train.get("schedule", {}), "warmup_steps": 1}
    return {**document, "train": {**train, "tokens": tokens, "schedule": schedule}}


def _published(document: dict[str, Any]) -> dict[str, Any]:
    """The document with a published model, if it names texts."""
    if not document.get("data", {}).get("sources"):
        return document
    model = {k: v for k, v in document.get("model", {}).items() if k not in OF_PUBLISHED}
    return {**document, "model": {**model, "from": "/models/ä"}}


def _elastic(document: dict[str, Any]) -> dict[str, Any]:
    return {
        **document,
        "parallel": {**document.get("parallel", {}), "dp_shard": "auto"},
        "resources": {**document.get("resources", {}), "nodes": {"min": 1, "max": 4}},
    }


def _listed(document: dict[str, Any]) -> dict[str, Any]:
    nodes = {"preferred": [{"dp_replicate": 2, "dp_shard": 1}, {"dp_shard": 1}]}
    parallel = {k: v for k, v in document.get("parallel", {}).items() if k != "dp_replicate"}
    return {
        **document,
        "parallel": {**parallel, "dp_shard": "auto"},
        "resources": {**document.get("resources", {}), "nodes": nodes},
    }


def section(model: type[BaseModel]) -> st.SearchStrategy[dict[str, Any]]:
    """Any keys of a section, with values that are valid by themselves."""
    values = {
        key: RELATED[key] if key in RELATED else field_values(field)
        for name, field in model.model_fields.items()
        if (key := field.alias or name) != "name"
    }
    return st.fixed_dictionaries({}, optional=values)


def field_values(field: FieldInfo) -> st.SearchStrategy[Any]:
    return of_type(field.annotation, *field.metadata)


def of_type(kind: Any, *limits: Any) -> st.SearchStrategy[Any]:
    """Values of a type that keep to pydantic's limits."""
    if get_origin(kind) is Annotated:
        inner, *more = get_args(kind)
        return of_type(inner, *more, *limits)
    if get_origin(kind) in (Union, types.UnionType):
        return st.one_of([of_type(each, *limits) for each in get_args(kind)])
    if get_origin(kind) is dict:
        return st.dictionaries(TEXT, of_type(get_args(kind)[1]), max_size=3)
    if get_origin(kind) is tuple:
        return st.tuples(*map(of_type, get_args(kind))).map(list)
    if kind in (int, float):
        return _number(kind, limits)
    is_section = isinstance(kind, type) and issubclass(kind, BaseModel)
    return section(kind) if is_section else TEXT if kind is str else st.from_type(kind)


def _number(kind: type, limits: tuple[Any, ...]) -> st.SearchStrategy[Any]:
    flat = [each for limit in limits for each in getattr(limit, "metadata", [limit])]
    bounds = {
        name: value
        for limit in flat
        for name in ("ge", "gt", "le", "lt")
        if (value := getattr(limit, name, None)) is not None
    }
    low = bounds.get("ge", bounds.get("gt", -(2**53) + 1))
    high = bounds.get("le", bounds.get("lt", 2**53 - 1))
    if kind is int:
        return st.integers(low, high)
    return st.floats(low, high, exclude_min="gt" in bounds, exclude_max="lt" in bounds)
