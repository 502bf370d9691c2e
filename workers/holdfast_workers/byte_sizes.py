"""Numbers of bytes in texts for people: one function and one kind of unit everywhere."""

from __future__ import annotations

UNITS = (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3))
LEAST = 0.9995
"""Least share of a unit that is written in that unit, because its three digits are "1"; less is
written in the next smaller unit."""


def size_of(nbytes: float) -> str:
    """E.g. "1.2 GB"; decimal units, as limits are written."""
    for unit, size in UNITS:
        number = nbytes / size
        if number >= LEAST:
            return f"{number:.3g} {unit}" if number < 999.5 else f"{number:.0f} {unit}"
    return f"{nbytes:.0f} bytes"
