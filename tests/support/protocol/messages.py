"""Messages of the protocol for its tests: random values and fixed examples."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from holdfast_workers.protocol import codec
from holdfast_workers.spec import Section

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=4,
)
_SIMPLE: dict[Any, st.SearchStrategy[Any]] = {
    Any: JSON,
    int: st.integers(-(2**53), 2**53),
    float: st.floats(allow_nan=False),
    str: st.text(max_size=8),
}
_EXAMPLES: dict[Any, Any] = {
    Any: {"key": [1, "text", None]},
    int: 3,
    float: 0.5,
    str: "text",
    bool: True,
    bytes: b"\x00\xff",
}


def fields_of(kind: type) -> dict[str, Any]:
    """The names of a dataclass's fields and their types, without the codec's annotations."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def values_of(kind: Any) -> st.SearchStrategy[Any]:  # noqa: PLR0911  (one for each type)
    """Any value of a type of the protocol."""
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    if is_section(kind):
        return st.just(example(kind))
    if dataclasses.is_dataclass(kind):
        fields = fields_of(kind)  # type: ignore[arg-type]
        return st.builds(kind, **{name: values_of(type_) for name, type_ in fields.items()})  # type: ignore[arg-type]
    arguments, origin = get_args(kind), get_origin(kind)
    if origin is tuple and arguments[-1] is ...:
        return st.lists(values_of(arguments[0]), max_size=2).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values_of, arguments))
    if origin is dict:
        return st.dictionaries(values_of(arguments[0]), values_of(arguments[1]), max_size=2)
    if origin is frozenset:
        return st.frozensets(values_of(arguments[0]), max_size=2)
    if is_literal(kind):
        return st.sampled_from(arguments)
    return st.one_of(*map(values_of, arguments)) if arguments else st.from_type(kind)


def example(kind: Any) -> Any:  # noqa: PLR0911  (one for each type)
    """A fixed value of a type of the protocol: nothing is empty, nothing random."""
    if kind in _EXAMPLES:
        return _EXAMPLES[kind]
    if is_section(kind):
        required = (name for name, each in kind.model_fields.items() if each.is_required())
        return kind(**dict.fromkeys(required, "text"))
    if dataclasses.is_dataclass(kind):
        fields = fields_of(kind)  # type: ignore[arg-type]
        return kind(**{name: example(type_) for name, type_ in fields.items()})  # type: ignore[operator]
    arguments, origin = get_args(kind), get_origin(kind)
    if origin is tuple:
        return tuple(example(argument) for argument in arguments if argument is not ...)
    if origin is dict:
        return {example(arguments[0]): example(arguments[1])}
    if origin is frozenset:
        return frozenset({example(arguments[0])})
    if is_literal(kind):
        return arguments[0]
    return example(arguments[0]) if arguments else next(iter(kind))  # a union, or an enum


def is_section(kind: Any) -> bool:
    """Whether the type is a spec or a section of one, whose values have tests of their own."""
    return isinstance(kind, type) and issubclass(kind, Section)


def is_literal(kind: Any) -> bool:
    return bool(get_args(kind)) and not any(
        isinstance(argument, type) or get_origin(argument) for argument in get_args(kind)
    )


def name_of(value: object) -> str:
    """The kind of a message: of a command or signal with its own kind."""
    inner = getattr(value, "command", None) or getattr(value, "detail", None)
    return f"{type(value).__name__} {inner.kind}" if inner is not None else type(value).__name__


def expanded(value: object) -> bytes:
    """The document with an unknown field in its header and in the object of every dataclass, as a
    later version may write it."""
    document = json.loads(codec.encode(value))
    known = _expand(document["value"], type(value))
    return json.dumps({**document, "value": known, "a_later_header": 1}).encode()


def _expand(data: Any, declared: Any) -> Any:
    arguments = get_args(declared)
    if isinstance(data, list) and arguments:
        return [_expand(item, arguments[0]) for item in data]
    if not isinstance(data, dict):
        return data
    for kind in (declared, *arguments):
        if dataclasses.is_dataclass(kind) and data.get("kind") in (None, _kind_of(kind)):
            fields = fields_of(kind)  # type: ignore[arg-type]
            if data.keys() == fields.keys():
                known = {name: _expand(item, fields[name]) for name, item in data.items()}
                return {**known, "a_later_field": {"x": 1}}
    return data


def _kind_of(kind: Any) -> Any:
    return getattr(kind, "kind", None)
