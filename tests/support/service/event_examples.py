"""Realistic events of every kind, and strategies that build any event."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from holdfast_service.job_model.events.codec import EVENT_TYPES
from holdfast_service.job_model.events.kinds import JobEvent

EXAMPLES = Path(__file__).parent / "event_examples.json"

_PLAIN: Mapping[Any, st.SearchStrategy[Any]] = {
    str: st.text(max_size=8),
    int: st.integers(-(2**40), 2**40),
    float: st.floats(allow_nan=False, allow_infinity=False),
    bool: st.booleans(),
    NoneType: st.none(),
}


def recorded() -> list[tuple[str, dict[str, Any]]]:
    """(kind, data) of the events in the file; some kinds have several."""
    return [(entry["kind"], entry["data"]) for entry in json.loads(EXAMPLES.read_text())]


def wire_names(part: type) -> set[str]:
    """The names of the fields of an event, or of a part of one, in JSON."""
    names = {_wire_name(part, field.name) for field in fields(part)}
    merged: str = getattr(part, "merged", "")
    if merged:
        names = names - {merged} | wire_names(get_type_hints(part)[merged])
    return names


def any_event(kind: str) -> st.SearchStrategy[JobEvent]:
    """Events of the kind, with every field set."""
    found: st.SearchStrategy[JobEvent] = _values(EVENT_TYPES[kind])
    return found


def with_unknown_fields(part: type, data: Any) -> Any:
    """`data`, the JSON of a `part`, with a further field in each object, at every level. (An empty
    object below the top stands for no value.)"""
    if get_origin(part) in (Union, UnionType):
        choices: tuple[type, ...] = get_args(part)
        part = next((choice for choice in choices if is_dataclass(choice)), NoneType)
    if get_origin(part) is tuple and isinstance(data, list):
        return [with_unknown_fields(get_args(part)[0], item) for item in data]
    if not is_dataclass(part) or not isinstance(data, dict):
        return data
    if not data and not issubclass(part, JobEvent):
        return data
    hints = get_type_hints(part)
    known = {_wire_name(part, name): hints[name] for name in (f.name for f in fields(part))}
    merged: str = getattr(part, "merged", "")
    if merged:
        data = with_unknown_fields(hints[merged], data)
    filled = {
        name: with_unknown_fields(known[name], value) if name in known else value
        for name, value in data.items()
    }
    return {**filled, "of_a_newer_version": [1]}


def _wire_name(part: type, name: str) -> str:
    """The alias of a field, if it has one."""
    extras = getattr(get_type_hints(part, include_extras=True)[name], "__metadata__", ())
    aliases = [extra.alias for extra in extras if getattr(extra, "alias", None)]
    return aliases[0] if aliases else name


def _values(hint: Any) -> st.SearchStrategy[Any]:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint in _PLAIN:
        return _PLAIN[hint]
    if origin in (Union, UnionType):
        return st.one_of(*map(_values, arguments))
    if origin is tuple:
        items = _values(arguments[0])
        of_any_length = arguments[-1] is Ellipsis
        return st.lists(items, max_size=2).map(tuple) if of_any_length else st.tuples(items, items)
    if origin is not None and issubclass(origin, Mapping):
        return st.dictionaries(*map(_values, arguments), max_size=2)
    if issubclass(hint, Enum):
        return st.sampled_from(hint)
    hints = get_type_hints(hint)
    return st.builds(hint, **{field.name: _values(hints[field.name]) for field in fields(hint)})
