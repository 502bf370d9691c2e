"""Turns an untrusted document into a typed spec, and reports all faults of form by their path.

Validation is strict (a string is not a number, 4.0 is not an integer), because a cluster spends
hours on what a spec says. If some fields are invalid, the rest is still returned with defaults in
their place, so that the caller can also check the relations between fields.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from holdfast_service.job_model.storable_text import UNSTORABLE, is_storable
from holdfast_workers.spec import OF_DEFAULT, SpecFault

Spec = TypeVar("Spec", bound=BaseModel)
Path = tuple[str | int, ...]  # location of an error, as pydantic gives it

MAX_DEPTH = 20
MAX_VALUES = 4000
"""Number of keys and values of a document; a spec with every option has a few hundred."""
MAX_FAULTS = 50
"""Most faults that are reported for one document."""
_MAX_INTEGER = 2**53 - 1  # JSON readers differ beyond it
_YAML_TEXT_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")


@dataclass(frozen=True)
class SpecReading(Generic[Spec]):
    """The result of reading a document."""

    spec: Spec | None  # None if too much of the document is invalid
    faults: tuple[SpecFault, ...]
    defaulted: tuple[str, ...] = ()  # paths of invalid fields, which have their default here


def validate_document(
    model: type[Spec], document: object, stand_ins: Mapping[str, Any]
) -> SpecReading[Spec]:
    """Read `document`; `stand_ins` replace missing or invalid required fields."""
    if not isinstance(document, Mapping):
        return SpecReading(
            None, (SpecFault(path="", message="a job spec must be a mapping of sections"),)
        )
    unstorable = [*islice(_unstorable(document), MAX_FAULTS + 1)]
    faults = [SpecFault(path=_dotted(path), message=why) for path, why in unstorable]
    if len(faults) > MAX_FAULTS:
        return SpecReading(None, (*faults[:MAX_FAULTS], SpecFault(path="", message="more faults")))
    bad: set[Path] = {path for path, _ in unstorable}
    unknown: set[Path] = set()
    # Removing an invalid field can only reveal a missing field, so that two rounds are enough; this
    # bound follows from the input and needs no such argument.
    for _ in range(2 + len(document)):
        kept = _without(document, bad)
        kept |= {key: value for key, value in stand_ins.items() if (key,) in bad}
        text = json.dumps(kept, default=str)
        try:
            spec = model.model_validate_json(text, strict=True)
            defaulted = tuple(_dotted(path) for path in bad - unknown)
            return SpecReading(spec, tuple(faults), defaulted)
        except ValidationError as failure:
            errors = [
                error for error in failure.errors(include_url=False) if error["type"] != OF_DEFAULT
            ]
            found = {_existing_prefix(document, error["loc"]) for error in errors}
            unknown |= {error["loc"] for error in errors if error["type"] == "extra_forbidden"}
            reported = {fault.path for fault in faults}
            # The search for the intended key takes time: report a bounded number of faults.
            faults += [
                fault
                for error in errors[:MAX_FAULTS]
                if (fault := _fault(model, error)).path not in reported
            ]
            if len(errors) > MAX_FAULTS:
                faults.append(SpecFault(path="", message=f"{len(errors) - MAX_FAULTS} more faults"))
                return SpecReading(None, tuple(faults))
            if found <= bad:
                break
            bad |= found
    return SpecReading(None, tuple(faults))


def size_fault(document: object) -> str | None:
    """The limit that a document of plain values exceeds, or None."""
    level, values = [document], 0
    for _ in range(MAX_DEPTH):
        values += len(level)
        inner: list[object] = []
        for value in level:
            if isinstance(value, Mapping):
                values += len(value)
                inner += value.values()
            elif isinstance(value, list):
                inner += value
        if values > MAX_VALUES:
            return f"more than {MAX_VALUES} keys and values"
        level = inner
    return f"nested deeper than {MAX_DEPTH} levels" if level else None


def _existing_prefix(document: Mapping[Any, Any], path: Path) -> Path:
    """The longest prefix of `path` that the document has: removing it removes the fault."""
    value: Any = document
    for depth, key in enumerate(path):
        if isinstance(value, Mapping) and key in value:
            value = value[key]
        elif isinstance(value, Mapping) and any(str(known) == key for known in value):
            value = next(item for known, item in value.items() if str(known) == key)
        elif isinstance(value, list) and isinstance(key, int) and key < len(value):
            return path[:depth]  # an invalid element makes its list invalid
        else:
            return path[: max(depth, 1)]
    return path


def _without(value: Any, bad: set[Path], path: Path = ()) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {
        str(key): _without(item, bad, (*path, str(key)))
        for key, item in value.items()
        if (*path, str(key)) not in bad
    }


def _unstorable(value: Any, path: Path = ()) -> Iterator[tuple[Path, str]]:
    """Values that the sections allow, but that JSON or a database cannot store."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not is_storable(str(key)):
                yield (*path, str(key)), f"the key {UNSTORABLE}"
            yield from _unstorable(item, (*path, str(key)))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            # A list is accepted or refused as a whole: report its path, and name the element.
            yield from ((path, f"element {index}: {why}") for _, why in _unstorable(item, path))
    elif isinstance(value, float) and not math.isfinite(value):
        yield path, f"{value} is not a finite number"
    elif isinstance(value, int) and abs(value) > _MAX_INTEGER:
        yield path, f"{_short(value)} is outside of ±{_MAX_INTEGER}"
    elif isinstance(value, str) and not is_storable(value):
        yield path, f"the text {UNSTORABLE}"


def _fault(model: type[BaseModel], error: ErrorDetails) -> SpecFault:
    path: Path = error["loc"]
    if error["type"] == "extra_forbidden":
        return SpecFault(path=_dotted(path), message=_unknown_key(model, path))
    if error["type"] == "missing":
        return SpecFault(path=_dotted(path), message="is missing")
    given = error["input"]
    if isinstance(given, str) and error["type"] in ("float_type", "int_type"):
        message = f"{_short(given)} is text, but a number is required"
        if _YAML_TEXT_NUMBER.fullmatch(given):
            mantissa, exponent = re.split("[eE]", given)
            point = "" if "." in mantissa else ".0"
            signed = exponent if exponent[0] in "+-" else f"+{exponent}"
            message += f": YAML reads it as a number if written {mantissa}{point}e{signed}"
        return SpecFault(path=_dotted(path), message=message)
    if error["type"] == "model_type":
        given = "null" if given is None else _short(given)
        return SpecFault(
            path=_dotted(path), message=f"{given} is not a section: write its keys below it"
        )
    return SpecFault(path=_dotted(path), message=f"{_lowered(error['msg'])}, not {_short(given)}")


def _unknown_key(model: type[BaseModel], path: Path) -> str:
    """Suggests the intended key: the nearest of the same section, or the same key elsewhere."""
    unknown = str(path[-1])
    section: type[BaseModel] | None = model
    for key in path[:-1]:
        section = _section(section, str(key)) if section else None
    keys = list(_fields(section)) if section else []
    near = difflib.get_close_matches(unknown, keys, n=1, cutoff=0.6)
    if near:
        return f"unknown key; did you mean {near[0]!r}?"
    all_keys = dict(_leaves(model))
    if unknown in all_keys:
        return f"unknown key here; did you mean {all_keys[unknown]!r}?"
    far = difflib.get_close_matches(unknown, list(all_keys), n=1, cutoff=0.75)
    if far:
        return f"unknown key; did you mean {all_keys[far[0]]!r}?"
    nearest = difflib.get_close_matches(unknown, keys, n=1, cutoff=0.0)
    return f"unknown key; the nearest known one is {nearest[0]!r}" if nearest else "unknown key"


def _fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """By the keys that a document has for them."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def _section(model: type[BaseModel], key: str) -> type[BaseModel] | None:
    """The section at `key`, also if it is optional (`Section | None`)."""
    field = _fields(model).get(key)
    kinds: list[Any] = [field.annotation] if field else []
    for kind in kinds:  # the list grows in the loop by the parts of unions and annotated types
        kinds.extend(get_args(kind))
    sections = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
    return sections[0] if sections else None


def _leaves(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key in _fields(model):
        yield key, prefix + key
        inner = _section(model, key)
        if inner:
            yield from _leaves(inner, f"{prefix}{key}.")


def _dotted(path: Path) -> str:
    text = ".".join(str(part) for part in path)
    return text.encode("utf-8", "backslashreplace").decode()


def _lowered(message: str) -> str:
    return message[:1].lower() + message[1:]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
