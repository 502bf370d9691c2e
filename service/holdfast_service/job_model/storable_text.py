"""Which texts JSON and every database can store."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

UNSTORABLE = "contains a NUL or half a surrogate pair: remove it"


def is_storable(text: str) -> bool:
    return "\0" not in text and not any("\ud800" <= character <= "\udfff" for character in text)


def _storable(text: str) -> str:
    if not is_storable(text):
        raise ValueError(f"the text {UNSTORABLE}")
    return text


StorableText = Annotated[str, AfterValidator(_storable)]
"""Every text of a request that is stored, or looked for in the database."""
