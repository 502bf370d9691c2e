"""The suites that are measured: which tests each runs, in which order. Pure.

What the tests are is said in one place, `SUITES` of `tests/support/suites/selection.py`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

SUITES: dict[str, tuple[str, str]] = {
    "affected": ("all-quick", "all-real"),
    "test": ("quick", "real"),
    "all": ("all-quick", "all-real"),
}
"""The values of pytest's `--suite` for the quick tests, and for those with real processes, which
run alone."""
OPTIONS: dict[str, tuple[str, ...]] = dict.fromkeys(("affected", "test"), ("--affected=HEAD",))
"""Of some suites, besides: the tests nearest to a mutation first, and none that it cannot reach. A
mutation is an uncommitted change."""


def commands(suite: str) -> list[list[str]]:
    """Each runs if those before it have not failed."""
    quick, real = SUITES[suite]
    pytest = [sys.executable, "-m", "pytest", "-x", "-q", *OPTIONS.get(suite, ())]
    return [[*pytest, "--suite", quick, "-n", "2"], [*pytest, "--suite", real]]


def environment(own: Mapping[str, str] = os.environ) -> dict[str, str]:
    """As the Makefile sets it."""
    defaults = {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    return {**defaults, **own, "PYTHONDONTWRITEBYTECODE": ""}
