"""Where two resolved specs differ, path by path. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from holdfast_service.views.lists import SpecDifferenceView

_NOTHING = object()


def differences(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[SpecDifferenceView]:
    """In the order of the left one; what it lacks comes last. A list is compared as a whole."""
    return list(_between(left, right, ""))


def _between(left: Any, right: Any, path: str) -> Iterator[SpecDifferenceView]:
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        for key in dict.fromkeys([*left, *right]):
            below = f"{path}.{key}" if path else str(key)
            yield from _between(left.get(key, _NOTHING), right.get(key, _NOTHING), below)
    elif left != right:
        yield SpecDifferenceView(path=path, left=_told(left), right=_told(right))


def _told(value: Any) -> Any:
    return None if value is _NOTHING else value
