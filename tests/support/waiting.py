"""Waiting for conditions that another thread or process makes true."""

from __future__ import annotations

import time
from collections.abc import Callable

DEADLINE_S = 60.0  # of every wait that must succeed: a slow machine turns no test red
SHORTEST_S = 0.0005
LONGEST_S = 0.05


def eventually(
    condition: Callable[[], object],
    within_s: float = DEADLINE_S,
    failure_message: object = "it did not come true",
) -> None:
    """Poll until `condition` holds, less often the longer it takes. Fails after `within_s` with
    `failure_message`, formatted at that time; a function is called for it."""
    began = time.monotonic()
    while not condition():
        waited = time.monotonic() - began
        if waited >= within_s:
            raise AssertionError(
                failure_message() if callable(failure_message) else failure_message
            )
        time.sleep(min(max(SHORTEST_S, waited / 10), LONGEST_S))
