"""The work of one pass over the queue: it does not grow with the nodes times the jobs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest

from holdfast_service.job_model.admission import Claim, LackedNodes, NodeDemand, admit
from holdfast_service.job_model.supervisor_protocol import Capacity, NodeCapacity

SIZES = (20, 80)


def lines_of(action: Callable[[], object]) -> int:
    """The lines of Python that it executes."""
    count, former = 0, sys.gettrace()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(former)
    return count


def queue_of(size: int) -> tuple[Capacity, list[Claim], list[Claim]]:
    """So many nodes, each with a job, and four times as many jobs that wait."""
    nodes = tuple(NodeCapacity(f"n{n}", f"10.0.0.{n}", 8.0, 0.0) for n in range(size))
    held = [Claim(f"h{n}", NodeDemand(1, 8.0, 0.0)) for n in range(size)]
    placed = {f"h{n}": (f"n{n}",) for n in range(size)}
    demands = [NodeDemand(1 + n % 3, 2.0, 0.0) for n in range(4 * size)]
    waits = [Claim(f"q{n}", demand) for n, demand in enumerate(demands)]
    return Capacity(nodes, can_grow=False, placed=placed), held, waits


@pytest.mark.parametrize("overdue", [0, 3])
def test_admission_works_in_proportion_to_the_nodes_and_the_jobs(overdue: int) -> None:
    def work(size: int) -> int:
        capacity, held, waits = queue_of(size)
        before = [replace(claim, overdue=overdue) for claim in waits[:-1]]
        return lines_of(lambda: admit(capacity, {}, held, before, waits[-1]))

    small, large = map(work, SIZES)
    assert large < 5 * small, "16 times as much if each job looks at each node"


def test_the_look_for_nodes_that_jobs_lack_works_in_proportion_to_the_nodes_and_the_jobs() -> None:
    def work(size: int) -> int:
        capacity, _, waits = queue_of(size)
        return lines_of(lambda: LackedNodes(capacity, {}, waits))

    small, large = map(work, SIZES)
    assert large < 5 * small, "16 times as much if each job looks at each node"
