"""Converts values to forms that both databases can store and every JSON parser can read.

Values from user programs (tracebacks, log lines, losses) may contain NUL characters, unpaired
surrogates or NaN. None of them may fail a transaction, because that would block the job.
"""

from __future__ import annotations

import json
import math
from typing import Any


def text(value: object) -> str:
    """`value` as text that a column can hold."""
    return str(value).replace("\0", "\ufffd").encode("utf-8", "replace").decode("utf-8")


def to_json(value: Any) -> str:
    """JSON without NUL characters and non-finite numbers; the latter become the strings "NaN",
    "Infinity" and "-Infinity"."""
    try:
        encoded = _dumps(value)
    except ValueError:
        encoded = _dumps(_finite(value))
    if "\\u0000" in encoded:
        # Rare. A parser written in C would treat it as the end of the text.
        encoded = _dumps(_without_nul(json.loads(encoded)))
    return encoded.encode("utf-8", "replace").decode("utf-8")


def number(value: object) -> float | None:
    """A stored number; None if it is not a number or not finite, which JSON cannot express."""
    if type(value) is float:  # the common case
        return value if math.isfinite(value) else None
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        found = float(value)
    except ValueError:
        return None
    return found if math.isfinite(found) else None


def _dumps(value: Any) -> str:
    return json.dumps(
        value, allow_nan=False, ensure_ascii=False, separators=(",", ":"), default=str
    )


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _without_nul(value: Any) -> Any:
    if isinstance(value, str):
        return value.replace("\0", "\ufffd")
    if isinstance(value, dict):
        return {_without_nul(key): _without_nul(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_nul(item) for item in value]
    return value
