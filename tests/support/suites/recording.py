"""What each test cost, as properties of its case in the JUnit file (`--junit-xml`).

A case has its marks, the seconds of each fixture that was set up for it, and the processor time
that the machine spent meanwhile: of this test alone, if no other runs beside it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

MARKS = "marks"
FIXTURE = "fixture "
PROCESSOR_S = "processor_s"

_fixtures = pytest.StashKey[dict[str, float]]()
_began = pytest.StashKey[float]()


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, Any, Any]:
    """Fixtures among its arguments were set up before; what it gets by name, it contains."""
    began = time.perf_counter()
    try:
        return (yield)
    finally:
        item = request._pyfuncitem
        costs = item.stash.setdefault(_fixtures, {})
        costs[fixturedef.argname] = time.perf_counter() - began


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    item.stash[_began] = machine_processor_s()
    return (yield)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    marks = sorted({mark.name for mark in item.iter_markers()} - {"parametrize", "usefixtures"})
    item.user_properties.append((MARKS, " ".join(marks)))
    for name, seconds in item.stash.get(_fixtures, {}).items():
        item.user_properties.append((FIXTURE + name, f"{seconds:.3f}"))
    spent = machine_processor_s() - item.stash[_began]
    item.user_properties.append((PROCESSOR_S, f"{spent:.2f}"))


def machine_processor_s() -> float:
    """The processor time that all processes of the machine have had since it started."""
    user, nice, system, _, _, irq, soft_irq, *_ = (
        int(ticks) for ticks in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    )
    return (user + nice + system + irq + soft_irq) / os.sysconf("SC_CLK_TCK")
