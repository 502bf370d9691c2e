"""The machine that the tests run on, named once per run: slow tests may be due to it."""

from __future__ import annotations

import os
import platform
import time

import psutil
import pytest
from _pytest.junitxml import xml_key

ROUNDS = 3
ADDITIONS = 5_000_000


def machine() -> str:
    """Cores, memory, load, and the seconds of a loop of five million additions: the best of three,
    0.2 to 0.3 s on a quiet machine of 2026."""
    loop_s = min(_loop_s() for _ in range(ROUNDS))
    memory_gib = psutil.virtual_memory().total / 2**30
    return (
        f"{len(os.sched_getaffinity(0))} cores, {memory_gib:.0f} GiB, load "
        f"{os.getloadavg()[0]:.2f}, a loop takes {loop_s:.2f} s, "
        f"Python {platform.python_version()}, {platform.system()} {platform.release()}"
    )


def pytest_report_header(config: pytest.Config) -> str:
    described = machine()
    if (junit := config.stash.get(xml_key, None)) is not None:
        junit.add_global_property("machine", described)
    return f"machine: {described}"


def _loop_s() -> float:
    began = time.perf_counter()
    total = 0
    for number in range(ADDITIONS):
        total += number
    return time.perf_counter() - began
