"""Waiting for what comes about in another thread or process."""

from __future__ import annotations

import time
from collections.abc import Callable

SHORTEST_S = 0.0005
LONGEST_S = 0.05


def eventually(
    condition: Callable[[], object], within_s: float = 10.0, story: object = "it did not come true"
) -> None:
    """Look until `condition` holds, the more rarely the longer it takes; fails after `within_s`
    with `story`, as it is then."""
    began = time.monotonic()
    while not condition():
        waited = time.monotonic() - began
        assert waited < within_s, story
        time.sleep(min(max(SHORTEST_S, waited / 10), LONGEST_S))
