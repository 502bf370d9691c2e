"""The names of mesh dimensions that consist of several axes, such as those of FSDP. Pure."""

from __future__ import annotations

_SIGN = "+"


def joined(*axes: str) -> str:
    """The name of one dimension made of these axes, outermost first."""
    return _SIGN.join(axes)


def axes_of(dimension: str) -> list[str]:
    """The axes that a dimension consists of; of an axis, itself."""
    return dimension.split(_SIGN)
