"""Every subset of a node's child processes killed at once, the agent left alive: the same bits."""

from __future__ import annotations

import contextlib
import os
import signal
from itertools import combinations, islice
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.chaos.conftest import STEPS, Undisturbed
from tests.support.nodes.history_proof import assert_same_history, incidents
from tests.support.nodes.supervised import SupervisedRun, small_training, supervised

pytestmark = pytest.mark.chaos

KINDS = ("ranks", "spares", "store", "templates", "zygote")
SUBSETS = [chosen for size in range(1, 6) for chosen in combinations(KINDS, size)]
MOST_ZYGOTES = 2
"""A node that loses its zygote three times within 30 s of its start is unfit."""
PATIENT: dict[str, Any] = {"timeouts": {"form_s": 1200.0}, "config": {"form_s": 900.0}}
"""A rendezvous around a dead store would outlast the wait for the job's end."""

THREADED_MODULE = "tests.support.ranks.threaded_recipe"
"""Not imported here: its thread would run in the process of all tests."""


def kill_children(run: SupervisedRun, seat: str, kinds: tuple[str, ...]) -> None:
    """Kill all of the agent's children of these kinds, the store last: the agent then sees the end
    of the ranks first."""
    agent = run.agents.agents[seat].process
    assert agent is not None
    ranks = {worker.pid for worker in run.agents.report(seat).workers if worker.rank is not None}
    names = {"hf-store": "store", "hf-template": "templates", "hf-zygote": "zygote"}
    doomed: dict[str, list[int]] = {kind: [] for kind in KINDS}
    for child in psutil.Process(agent.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            name = child.name()
            if name == "hf-worker":
                doomed["ranks" if child.pid in ranks else "spares"].append(child.pid)
            elif name in names:
                doomed[names[name]].append(child.pid)
    for kind in sorted(kinds, key=lambda kind: kind == "store"):
        for pid in doomed[kind]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def play(run: SupervisedRun, subsets: list[tuple[str, ...]]) -> None:
    """Kill each subset while the job trains, on the nodes in turn."""
    for number, kinds in enumerate(subsets):
        due = run.newest_step() + 3
        run.wait(lambda due=due: run.newest_step() >= due)  # type: ignore[misc]
        kill_children(run, f"n{number % 2}", kinds)


def assert_recovered(run: SupervisedRun, undisturbed: Undisturbed) -> None:
    assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
    assert_same_history(run, undisturbed)
    assert incidents(run), run.story()
    for incident in incidents(run):
        phases_s = dict(incident["phases_s"])
        total_s = phases_s.pop("total")
        assert sum(phases_s.values()) == pytest.approx(total_s)


@pytest.mark.cell("P6", "zygote")
def test_a_rendezvous_never_waits_for_a_store_that_died_with_all_children_of_its_node(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    training = small_training(STEPS, recipe="tests.support.ranks.recipes:ImportsSlowly")
    with supervised(tmp_path, training, standbys=0, **PATIENT) as run:
        play(run, [KINDS] * 2)
        assert_recovered(run, undisturbed)


def test_no_rank_is_forked_from_a_process_in_which_the_recipes_module_runs_a_thread(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """A lock that the thread holds at a fork is never released in the child."""
    training = small_training(STEPS, recipe=f"{THREADED_MODULE}:LocksInThread")
    with supervised(tmp_path, training, standbys=0, **PATIENT) as run:
        run.wait_step(10)
        run.kill(1)
        run.wait_step(30)
        kill_children(run, "n0", ("ranks", "spares", "zygote"))
        assert_recovered(run, undisturbed)
        warnings = [line for line in run.logs if THREADED_MODULE in line]
        assert len(warnings) == len(run.agents.seats), warnings  # once on each node
        assert all("lock-holder" in line for line in warnings)


def in_jobs(subsets: list[tuple[str, ...]]) -> list[list[tuple[str, ...]]]:
    """The subsets, spread over jobs so that no node loses too many zygotes."""
    with_zygote = iter([chosen for chosen in subsets if "zygote" in chosen])
    without = iter([chosen for chosen in subsets if "zygote" not in chosen])
    jobs = []
    while batch := [*islice(with_zygote, 2 * MOST_ZYGOTES), *islice(without, 4)]:
        jobs.append(batch)
    return jobs


@pytest.mark.parametrize(
    "subsets",
    [
        pytest.param(subsets, marks=pytest.mark.soak) if number else subsets
        for number, subsets in enumerate(in_jobs(SUBSETS))
    ],
)
def test_any_subset_of_the_children_of_a_node_may_die_at_once(
    tmp_path: Path, undisturbed: Undisturbed, subsets: list[tuple[str, ...]]
) -> None:
    # An agent that starts a zygote answers late: the job must not end meanwhile.
    training = small_training(STEPS, recipe="tests.support.ranks.recipes:PacedSteps")
    with supervised(tmp_path, training, standbys=0, **PATIENT) as run:
        play(run, subsets)
        assert_recovered(run, undisturbed)
