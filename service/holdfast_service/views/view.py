"""The base of all response models: read-only values for JSON.

Times are RFC 3339 in JSON, and Unix seconds in Python. A number that was not measured is null,
never zero. Everything is derived from the store alone, so all API servers return the same values.
"""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ConfigDict


class View(BaseModel):
    model_config = ConfigDict(frozen=True, defer_build=True)  # a CLI command uses few of them

    @classmethod
    def from_attributes(cls, source: object, **other: Any) -> Self:
        """The view of `source`, which has every field that `other` lacks, under the same name."""
        same = {name: getattr(source, name) for name in cls.model_fields if name not in other}
        return cls(**same, **other)
