"""From an untrusted document to a typed spec: every fault of form, each at its path, at once.

Validation is strict (text is no number, 4.0 is no integer), because a spec says what a cluster
will burn hours on. Where fields are at fault, the rest is still returned with those fields at
their defaults, so that the caller can go on to look for faults in the relations between fields.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from holdfast_workers.spec import Fault

Spec = TypeVar("Spec", bound=BaseModel)
Path = tuple[str | int, ...]  # as pydantic names the place of an error

MOST_FAULTS = 50
"""That are told of a document at once."""
_LARGEST = 2**53 - 1  # beyond it JSON readers differ
_YAML_TEXT_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")


@dataclass(frozen=True)
class Reading(Generic[Spec]):
    """What came of a document."""

    spec: Spec | None  # None where too little was left
    faults: tuple[Fault, ...]
    defaulted: tuple[str, ...] = ()  # paths of fields that stand at their default for a fault


def validated(model: type[Spec], document: object, stand_ins: Mapping[str, Any]) -> Reading[Spec]:
    """Read `document`; `stand_ins` take the place of required fields missing or at fault."""
    if not isinstance(document, Mapping):
        return Reading(None, (Fault(path="", message="a job spec is a mapping of sections"),))
    faults = [Fault(path=_dotted(path), message=why) for path, why in _unstorable(document)]
    bad: set[Path] = {path for path, _ in _unstorable(document)}
    unknown: set[Path] = set()
    # Taking away what is at fault can only bring out a missing field: two rounds suffice, but a
    # bound that follows from the input needs no such argument.
    for _ in range(2 + len(document)):
        kept = _without(document, bad)
        kept |= {key: value for key, value in stand_ins.items() if (key,) in bad}
        text = json.dumps(kept, default=str)
        try:
            spec = model.model_validate_json(text, strict=True)
            defaulted = tuple(_dotted(path) for path in bad - unknown)
            return Reading(spec, tuple(faults), defaulted)
        except ValidationError as failure:
            errors = failure.errors(include_url=False)
            found = {_known(document, error["loc"]) for error in errors}
            unknown |= {error["loc"] for error in errors if error["type"] == "extra_forbidden"}
            told = {fault.path for fault in faults}
            # To find out what was meant takes time: a document all wrong is not told all of it.
            faults += [
                fault
                for error in errors[:MOST_FAULTS]
                if (fault := _fault(model, error)).path not in told
            ]
            if len(errors) > MOST_FAULTS:
                faults.append(Fault(path="", message=f"{len(errors) - MOST_FAULTS} faults more"))
                return Reading(None, tuple(faults))
            if found <= bad:
                break
            bad |= found
    return Reading(None, tuple(faults))


def _known(document: Mapping[Any, Any], path: Path) -> Path:
    """The longest part of `path` that the document has: what must go for the fault to go."""
    here: Any = document
    for depth, key in enumerate(path):
        if isinstance(here, Mapping) and key in here:
            here = here[key]
        elif isinstance(here, Mapping) and any(str(known) == key for known in here):
            here = next(value for known, value in here.items() if str(known) == key)
        elif isinstance(here, list) and isinstance(key, int) and key < len(here):
            return path[:depth]  # an element at fault spoils its list
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
    """Values that no section forbids, yet that JSON or a database could not keep."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _unstorable(item, (*path, str(key)))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            # A list is taken or refused as a whole: its own path, with the element named.
            yield from ((path, f"element {index}: {why}") for _, why in _unstorable(item, path))
    elif isinstance(value, float) and not math.isfinite(value):
        yield path, f"{value} is no finite number"
    elif isinstance(value, int) and abs(value) > _LARGEST:
        yield path, f"{value} is beyond ±{_LARGEST}"
    elif isinstance(value, str) and not _encodable(value):
        yield path, "text with a NUL or half a surrogate pair in it"


def _encodable(text: str) -> bool:
    return "\0" not in text and not any("\ud800" <= letter <= "\udfff" for letter in text)


def _fault(model: type[BaseModel], error: ErrorDetails) -> Fault:
    path: Path = error["loc"]
    if error["type"] == "extra_forbidden":
        return Fault(path=_dotted(path), message=_unknown_key(model, path))
    if error["type"] == "missing":
        return Fault(path=_dotted(path), message="is missing")
    given = error["input"]
    if isinstance(given, str) and error["type"] in ("float_type", "int_type"):
        message = f"{given!r} is text, a number is needed"
        if _YAML_TEXT_NUMBER.fullmatch(given):
            mantissa, exponent = re.split("[eE]", given)
            point = "" if "." in mantissa else ".0"
            signed = exponent if exponent[0] in "+-" else f"+{exponent}"
            message += f": YAML reads it as one when written {mantissa}{point}e{signed}"
        return Fault(path=_dotted(path), message=message)
    if error["type"] == "model_type":
        given = "null" if given is None else _short(given)
        return Fault(path=_dotted(path), message=f"{given} is no section: write its keys below it")
    return Fault(path=_dotted(path), message=f"{_lowered(error['msg'])}, not {_short(given)}")


def _unknown_key(model: type[BaseModel], path: Path) -> str:
    """Says which key was meant: the nearest of the same section, or the same key elsewhere."""
    unknown = str(path[-1])
    section: type[BaseModel] | None = model
    for key in path[:-1]:
        section = _section(section, str(key)) if section else None
    here = list(section.model_fields) if section else []
    near = difflib.get_close_matches(unknown, here, n=1, cutoff=0.6)
    if near:
        return f"unknown key; did you mean {near[0]!r}?"
    everywhere = dict(_leaves(model))
    if unknown in everywhere:
        return f"unknown key here; did you mean {everywhere[unknown]!r}?"
    far = difflib.get_close_matches(unknown, list(everywhere), n=1, cutoff=0.75)
    if far:
        return f"unknown key; did you mean {everywhere[far[0]]!r}?"
    nearest = difflib.get_close_matches(unknown, here, n=1, cutoff=0.0)
    return f"unknown key; the nearest known one is {nearest[0]!r}" if nearest else "unknown key"


def _section(model: type[BaseModel], key: str) -> type[BaseModel] | None:
    """The section that stands under `key`, also where it may be left out (`Section | None`)."""
    field = model.model_fields.get(key)
    kinds: list[Any] = [field.annotation] if field else []
    for kind in kinds:  # which grows meanwhile: by the parts of a union, of an annotated type
        kinds.extend(get_args(kind))
    sections = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
    return sections[0] if sections else None


def _leaves(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key in model.model_fields:
        yield key, prefix + key
        inner = _section(model, key)
        if inner:
            yield from _leaves(inner, f"{prefix}{key}.")


def _dotted(path: Path) -> str:
    return ".".join(str(part) for part in path)


def _lowered(message: str) -> str:
    return message[:1].lower() + message[1:]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
