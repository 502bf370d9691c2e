"""What a folder says, in sentences: short and printable, however long or odd it is. Pure."""

from __future__ import annotations

import reprlib

_MOST = 80
"""Characters of a value or a name in a sentence."""

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = _MOST


def shown(value: object) -> str:
    """A value of JSON, as Python writes it. Only the part that is shown is converted."""
    return _cut(_repr.repr(value))


def shown_name(name: str) -> str:
    """The name of a tensor, a file or a key."""
    start = name[: _MOST + 1]
    return _cut(start if start.isprintable() else repr(start))


def _cut(text: str) -> str:
    return text if len(text) <= _MOST else f"{text[: _MOST - 3]}..."
