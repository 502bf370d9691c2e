"""Which texts JSON and every database can store."""

from __future__ import annotations

UNSTORABLE = "contains a NUL or half a surrogate pair: remove it"


def is_storable(text: str) -> bool:
    return "\0" not in text and not any("\ud800" <= character <= "\udfff" for character in text)
