"""How good the result of a check is. Imports nothing else: the client loads it too."""

from __future__ import annotations

from enum import StrEnum


class Grade(StrEnum):
    GOOD = "good"
    ODD = "odd"
    """Jobs run, but less well, or not all of them."""
    BAD = "bad"
    """Jobs will fail there."""
