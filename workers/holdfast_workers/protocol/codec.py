"""The codec of all messages between processes that may run different versions of Holdfast.

A document is one JSON object, `{"format": 1, "kind": "Fence", "value": {...}}`: `kind` is the name
of the value's dataclass. The rules for changes:

- A new field has a default: a reader fills in what is missing, and ignores what it does not know.
- Fields and kinds are never renamed, and never change their meaning.
- `FORMAT` grows only with a change that older readers would misread; they refuse such a document.

Nothing is ever unpickled. Strings must be text: an unpaired surrogate arrives as "?".
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cache
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from holdfast_workers.errors import WorkersError

FORMAT = 1
"""Version of the document format that this version of Holdfast writes."""

_FIRST = re.compile(rb'\{"format":(\d{1,9}),"kind":"(\w+)",')
Value = TypeVar("Value")


class UnreadableDocument(WorkersError, ValueError):
    """The document is damaged, of another kind than expected, or of a newer format."""


class _Header(BaseModel):
    model_config = ConfigDict(hide_input_in_errors=True)  # a document may hold a secret

    format: int
    kind: str


class _Document(BaseModel, Generic[Value]):
    # Non-finite numbers as Python's `json` writes them: limits may be infinite.
    model_config = ConfigDict(
        ser_json_bytes="base64",
        val_json_bytes="base64",
        ser_json_inf_nan="constants",
        hide_input_in_errors=True,
    )

    format: int
    kind: str
    value: Value


def encode(value: object) -> bytes:
    """The document of a dataclass."""
    kind: type = type(value)
    document = _document_of(kind)(format=FORMAT, kind=kind.__name__, value=value)
    try:
        return document.model_dump_json().encode()
    except PydanticSerializationError:  # an unpaired surrogate
        values = document.model_dump(mode="json")
        return json.dumps(values, ensure_ascii=False).encode(errors="replace")


def decode(document: bytes, *kinds: type[Value]) -> Value:
    """The value of a document of one of `kinds`. Raises UnreadableDocument."""
    expected: dict[str, type] = {kind.__name__: kind for kind in kinds}
    try:
        header = _header(document)
        _check(header, expected)
        value: Value = _document_of(expected[header.kind]).model_validate_json(document).value
    except ValidationError as error:
        raise UnreadableDocument(
            f"not a document of kind {', '.join(expected)} (format {FORMAT}): {error}"
        ) from error
    return value


def as_json(value: object) -> dict[str, Any]:
    """The JSON values of a dataclass, to be stored as part of another document."""
    kind: type = type(value)
    values: dict[str, Any] = _adapter_of(kind).dump_python(value, mode="json", by_alias=True)
    return values


def restore(kind: type[Value], values: Any) -> Value:
    """The dataclass of its JSON values. Raises UnreadableDocument."""
    try:
        known: type = kind
        value: Value = _adapter_of(known).validate_python(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "the whole"
        raise UnreadableDocument(
            f"not the values of {kind.__name__}: {place}: {first['msg']}"
        ) from error
    return value


def _header(document: bytes) -> _Header:
    """The header, without a look at the value if it comes first, as `encode` writes it."""
    found = _FIRST.match(document)
    if found is None:
        return _Header.model_validate_json(document)
    return _Header.model_construct(format=int(found[1]), kind=found[2].decode())


def _check(header: _Header, expected: Iterable[str]) -> None:
    """Raise UnreadableDocument if this version of Holdfast cannot read the document."""
    if header.format > FORMAT:
        raise UnreadableDocument(
            f"a document of kind {header.kind} has format {header.format}, and this version of "
            f"Holdfast reads formats up to {FORMAT}: run the same version on all nodes"
        )
    if header.kind not in expected:
        raise UnreadableDocument(
            f"a document of kind {header.kind} (format {header.format}) arrived instead of "
            f"{' or '.join(expected)} (format {FORMAT}): run the same version on all nodes"
        )


def prepare(*kinds: type) -> None:
    """Do now what the first use of each kind would do: it takes milliseconds, which must not be
    part of a recovery. Processes forked afterwards need no preparation of their own."""
    for kind in kinds:
        _document_of(kind)


@cache
def _document_of(kind: type) -> type[_Document[Any]]:
    return _Document[kind]  # type: ignore[valid-type]


@cache
def _adapter_of(kind: type) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
