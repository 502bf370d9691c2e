"""A fault of a spec, for the user who mends it."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

OF_DEFAULT = "default_factory_not_called"
"""The type of pydantic's error for a default that depends on an invalid field. That field is the
fault."""


class SpecFault(BaseModel):
    """One fault of a spec: its path in the spec, and a message that says how to fix it."""

    model_config = ConfigDict(frozen=True)

    path: str
    message: str
    beside: tuple[str, ...] = Field(default=(), exclude=True)
    """The paths of the other fields, or sections, on which the fault depends."""
