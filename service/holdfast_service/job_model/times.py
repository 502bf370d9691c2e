"""Points in time in the API: RFC 3339 in JSON, Unix seconds in Python."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

_LAST = datetime(9999, 12, 31, tzinfo=UTC).timestamp()
_NAMES = frozenset({"since", "until"})


def rfc3339(seconds: float) -> str:
    """Unix seconds as `2026-01-31T12:00:00.000000Z`; a time that this cannot express becomes the
    nearest one that it can."""
    moment = datetime.fromtimestamp(min(seconds, _LAST) if seconds > 0 else 0, UTC)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def unix_seconds(value: Any) -> Any:
    """Unix seconds of a text as RFC 3339 describes it; other values are left to the validator.

    Raises ValueError.
    """
    if not isinstance(value, str):
        return value
    moment = datetime.fromisoformat(value)
    if moment.tzinfo is None:
        raise ValueError("a time needs its offset: write 2026-01-31T12:00:00Z")
    return moment.timestamp()


def with_rfc3339(value: Any, name: str = "") -> Any:
    """A document whose times (`since`, `until`, and what ends in `_at`) are RFC 3339."""
    match value:
        case dict():
            return {key: with_rfc3339(item, key) for key, item in value.items()}
        case list() | tuple():
            return [with_rfc3339(item) for item in value]
        case int() | float() if name in _NAMES or name.endswith("_at"):
            return rfc3339(value)
    return value


def _as_text(value: Any) -> Any:
    if not isinstance(value, str):
        raise ValueError("a time is a text: write 2026-01-31T12:00:00Z")
    return value


_SCHEMA = WithJsonSchema({"type": "string", "format": "date-time"})
Time = Annotated[
    float,
    BeforeValidator(unix_seconds),
    PlainSerializer(rfc3339, return_type=str, when_used="json"),
    _SCHEMA,
]
GivenTime = Annotated[float, BeforeValidator(unix_seconds), BeforeValidator(_as_text), _SCHEMA]
"""A time in a request."""
EventDocument = Annotated[
    dict[str, Any], PlainSerializer(with_rfc3339, return_type=dict[str, Any], when_used="json")
]
"""The data of an event."""
