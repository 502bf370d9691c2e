"""Compares two resolved specs, path by path. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from holdfast_service.views.lists import SpecDifferenceView

_MISSING = object()


def differences(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[SpecDifferenceView]:
    """The differing paths in the order of `left`; paths only in `right` come last. Lists are
    compared as a whole."""
    return list(_between(left, right, ""))


def _between(left: Any, right: Any, path: str) -> Iterator[SpecDifferenceView]:
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        for key in dict.fromkeys([*left, *right]):
            below = f"{path}.{key}" if path else str(key)
            yield from _between(left.get(key, _MISSING), right.get(key, _MISSING), below)
    elif left != right:
        yield SpecDifferenceView(path=path, left=_json_value(left), right=_json_value(right))


def _json_value(value: Any) -> Any:
    return None if value is _MISSING else value
