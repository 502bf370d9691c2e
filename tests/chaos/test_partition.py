"""Node links are cut and restored: only one attempt steps at a time, training goes on, and a
reconnected node is checked and used again.

Agents live in network namespaces, and all their traffic with the supervisor uses their links. The
workers' own files on both sides of the cut record the steps with their times.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
from tests.support.nodes import namespaces
from tests.support.nodes.namespaces import RemoteAgents, cut
from tests.support.nodes.supervised import SupervisedRun, small_training, supervised
from tests.support.ranks.step_log import FOLDER, PACE, LoggedStep, logged_steps

from holdfast_service.job_model.supervisor_protocol import EventKind, StopKind
from holdfast_service.supervisor.supervisor_times import SupervisorTimes
from holdfast_workers.spec import (
    CheckpointSpec,
    MemoryTierSpec,
    ModelSpec,
    ParallelSpec,
    RemoteTierSpec,
    TrainingSpec,
)

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.skipif(bool(namespaces.why_not()), reason=namespaces.why_not() or "namespaces"),
]

HEARTBEAT_S = 1.0
LEASE_S, MARGIN_S = 2.0, 0.5
PACE_S = 0.05
MAX_UNPOLLED = 8
"""Steps that a node may have made since its last poll, on a busy machine."""
MAX_STEPS = 100_000
"""No job reaches this step; the tests stop them."""


@dataclass(frozen=True)
class Layout:
    workers_per_node: int
    standbys: int


ACROSS = Layout(workers_per_node=1, standbys=1)  # a cut separates the ranks
ON_ONE_NODE = Layout(workers_per_node=2, standbys=1)  # all ranks are on one side of a cut


def training() -> TrainingSpec:
    """Two ranks; a step takes a few milliseconds plus the pace."""
    return small_training(
        MAX_STEPS,
        recipe="tests.support.ranks.step_log:LogsSteps",
        model=ModelSpec(dim=32, layers=1, heads=2, kv_heads=1, sequence_length=32),
        parallel=ParallelSpec(dp_shard=2),
        checkpoint=CheckpointSpec(
            memory=MemoryTierSpec(every_steps=1), remote=RemoteTierSpec(every_steps=0)
        ),
    )


@contextmanager
def partitioned(folder: Path, layout: Layout) -> Iterator[SupervisedRun]:
    config = {
        "lease_s": LEASE_S,
        "lease_margin_s": MARGIN_S,
        "free_after_s": 0.2,
        "max_failures": 1000,
    }
    with (
        logging_steps(folder / "steps", PACE_S),
        supervised(
            folder,
            training(),
            standbys=layout.standbys,
            workers_per_node=layout.workers_per_node,
            agents=RemoteAgents,
            times=SupervisorTimes(
                poll_s=0.1, heartbeat_timeout_s=HEARTBEAT_S, refresh_s=MARGIN_S / 5
            ),
            config=config,
            heartbeat_s=HEARTBEAT_S / 8,
        ) as run,
    ):
        yield run


@contextmanager
def logging_steps(folder: Path, pace_s: float) -> Iterator[None]:
    folder.mkdir(exist_ok=True)
    os.environ |= {FOLDER: str(folder), PACE: str(pace_s)}
    try:
        yield
    finally:
        del os.environ[FOLDER], os.environ[PACE]


def cut_and_restore(run: SupervisedRun, rng: random.Random) -> str:
    """Cut off a node of the attempt at a random moment, wait until training goes on without it,
    restore the link, and wait until the node is ready again. Returns its seat."""
    agents = run.agents
    assert isinstance(agents, RemoteAgents)
    seat = rng.choice(sorted({seat for seat, _ in run.workers().values()}))
    time.sleep(rng.uniform(0.0, 0.4))
    attempt = run.all_rows[-1].attempt
    seen_events = len(run.events)
    with cut(agents, seat, rng.uniform(0.0, 0.5)):
        run.wait(lambda: run.all_rows[-1].attempt > attempt)
        members = run.of(EventKind.ATTEMPT_FORMING)[-1]["members"]
        assert seat not in {member["agent"] for member in members}, run.story()
    run.wait(lambda: is_back(run, seat, seen_events))
    return seat


def is_back(run: SupervisedRun, seat: str, seen_events: int) -> bool:
    """Whether the agent is a standby again after it was cut off."""
    since = [e.data for e in run.events[seen_events:] if e.kind == EventKind.STANDBY]
    return any(standby["agent"] == seat and standby["state"] == "ready" for standby in since)


def assert_one_attempt_at_a_time(logged: list[LoggedStep]) -> None:
    """By the workers' own files: no attempt makes a step after a later attempt's first step."""
    last: dict[int, float] = {}
    first: dict[int, float] = {}
    for step in logged:
        first.setdefault(step.attempt, step.at)
        last[step.attempt] = step.at
    attempts = sorted(first)
    assert attempts == list(dict.fromkeys(step.attempt for step in logged))
    for before, after in pairwise(attempts):
        assert last[before] < first[after], f"attempt {before} steps during attempt {after}"


def undisturbed_digests(folder: Path, steps: int) -> dict[int, str]:
    folder.mkdir()
    with (
        logging_steps(folder, 0.0),
        supervised(folder, training(), standbys=0, workers_per_node=2) as run,
    ):
        run.wait(lambda: steps in run.digests, 300.0)
        return {step: run.digests[step] for step in range(steps + 1)}


def run_partitions(folder: Path, layout: Layout, cuts: int) -> None:
    """Run with `cuts` partitions, and check all invariants."""
    seed = int(os.environ.get("HOLDFAST_SEED", time.time_ns() % 1_000_000))
    print(f"HOLDFAST_SEED={seed}")
    rng = random.Random(seed)
    with partitioned(folder, layout) as run:
        run.wait(lambda: len(run.of(EventKind.STANDBY)) >= layout.standbys and bool(run.rows))
        seats = [cut_and_restore(run, rng) for _ in range(cuts)]
        run.stop(StopKind.CANCEL)
        assert run.wait_end()["outcome"] == "CANCELLED", run.story()
        logged = logged_steps(folder / "steps")
        assert_one_attempt_at_a_time(logged)
        formed = run.of(EventKind.ATTEMPT_FORMING)
        assert len(formed) >= cuts + 1
        reached = max(run.rows)
        assert {step.step for step in logged} == set(range(1, reached + 1)), run.story()
        # Steps since the last poll that only the cut-off node knew are not reported.
        unreported = set(range(1, reached + 1)) - set(run.rows)
        most = MAX_UNPOLLED * cuts if layout.workers_per_node == 2 else 0
        assert len(unreported) <= most, (unreported, run.story())
        digests = dict(run.digests)
    expected = undisturbed_digests(folder / "undisturbed", reached)
    assert digests.items() <= expected.items()
    assert len(expected) - len(digests) <= 2 * len(unreported)
    again = {member["agent"] for forming in formed[1:] for member in forming["members"]}
    assert again & set(seats[:-1]), "a node that was cut off is used again"


def test_one_attempt_steps_at_a_time_whichever_link_is_cut(tmp_path: Path) -> None:
    run_partitions(tmp_path, ACROSS, 3)


@pytest.mark.cell("P1", "node")
def test_an_injected_partition_disconnects_the_node_and_reconnects_it(
    tmp_path: Path,
) -> None:
    with partitioned(tmp_path, ACROSS) as run:
        run.wait(lambda: bool(run.of(EventKind.STANDBY)) and len(run.rows) > 5)
        agents = run.agents
        assert isinstance(agents, RemoteAgents)
        seat = run.workers()[1][0]
        seen_events = len(run.events)
        began = time.monotonic()
        with agents.out_of_reach(seat):
            run.inject("partition", rank=1, duration_s=3.0)
            run.wait(lambda: run.all_rows[-1].attempt > 1)
            members = run.of(EventKind.ATTEMPT_FORMING)[-1]["members"]
            assert seat not in {member["agent"] for member in members}, run.story()
        run.wait(lambda: is_back(run, seat, seen_events))
        assert time.monotonic() - began > 3.0
        run.stop(StopKind.CANCEL)
        assert run.wait_end()["outcome"] == "CANCELLED", run.story()
        assert_one_attempt_at_a_time(logged_steps(tmp_path / "steps"))


@pytest.mark.soak
@pytest.mark.parametrize(("layout", "cuts"), [(ACROSS, 30), (ON_ONE_NODE, 30)])
def test_one_attempt_steps_at_a_time_through_many_partitions(
    tmp_path: Path, layout: Layout, cuts: int
) -> None:
    run_partitions(tmp_path, layout, cuts)
