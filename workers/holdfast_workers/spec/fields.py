"""What the sections of a spec are made of: their base class, and types of fields."""

from __future__ import annotations

import re
import shlex
from fractions import Fraction
from math import isfinite
from typing import Annotated, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Reference = Annotated[str, Field(max_length=4096)]
"""A path, a URI or a name; no path of Linux is longer."""
Endpoint = Annotated[
    Reference | None,
    Field(
        description="URL of the S3 service, which needs `secret`. null: AWS_ENDPOINT_URL, or AWS."
    ),
]
Region = Annotated[
    Reference | None, Field(description="Region of the bucket. null: AWS_DEFAULT_REGION.")
]


def _steps_or_auto(value: object) -> object:
    """The validated value, with one error message for both types; a union would report one for each
    of its members."""
    if value == "auto" or (type(value) is int and value >= 0):
        return value
    raise PydanticCustomError("steps_or_auto", "input should be a whole number of steps, or auto")


Every = Annotated[
    int | Literal["auto"],
    PlainValidator(_steps_or_auto),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0}, {"const": "auto"}]}),
]


MOST_TOKENS = 2**53 - 1
_AMOUNT = re.compile(r"[0-9]{1,99}(\.[0-9]{0,99})?([eE]\+?[0-9]{1,2})?")


def _tokens(value: object) -> object:
    """A whole number, also as 20e9, which is a float in JSON and a text in YAML 1.1."""
    if (
        type(value) is int
        or (isinstance(value, float) and isfinite(value))
        or (isinstance(value, str) and _AMOUNT.fullmatch(value))
    ):
        exact = Fraction(value)
        if exact.denominator == 1 and 1 <= exact <= MOST_TOKENS:
            return int(exact)
    raise PydanticCustomError(
        "tokens", f"input should be a whole number of tokens from 1 to {MOST_TOKENS}, such as 20e9"
    )


TokenAmount = Annotated[
    int,
    PlainValidator(_tokens),
    WithJsonSchema({"type": "number", "minimum": 1, "maximum": MOST_TOKENS}),
]


def _words(value: object) -> object:
    """A text's words, as a shell would divide it; the words themselves."""
    if not isinstance(value, str):
        return tuple(value) if isinstance(value, list) else value
    try:
        return tuple(shlex.split(value))
    except ValueError as error:
        why = "it cannot be divided into arguments ({why}): check its quotes"
        raise PydanticCustomError("words", why, {"why": str(error)}) from error


CommandLine = Annotated[
    tuple[Reference, ...],
    Field(max_length=4096),
    BeforeValidator(_words, json_schema_input_type=str | list[str]),
]
"""A program and its arguments: written as one text or as a list, and always kept as a list."""


Part = TypeVar("Part", bound="Section")


class Section(BaseModel):
    """A section of a spec: immutable; unknown keys are rejected."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def part(self, kind: type[Part]) -> Part:
        """The fields that this section has of one of its base classes."""
        return kind(**{name: getattr(self, name) for name in kind.model_fields})
