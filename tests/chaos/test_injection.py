"""Injected faults in a running job: each happens once, to its victim, and the job ends with the
undisturbed run's bits."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.chaos.conftest import STEPS, Undisturbed
from tests.support.nodes.history_proof import assert_same_history, incidents
from tests.support.nodes.supervised import SupervisedRun, small_training, supervised

from holdfast_workers.fault_injection.kinds import FaultKind, Injection

pytestmark = pytest.mark.chaos
SUPERVISOR_DEATH = Injection(FaultKind.SUPERVISOR_DEATH)


def lost_ranks(run: SupervisedRun) -> list[tuple[str, list[int]]]:
    return [
        (incident["cause"], lost["ranks"])
        for incident in incidents(run)
        for lost in incident["lost"]
        if lost["cause"] == incident["cause"]
    ]


def test_an_injected_death_of_a_supervisor_agent_or_node_happens_once(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    with supervised(tmp_path, small_training(STEPS), standbys=1) as run:
        run.wait_step(5)
        before = run.supervisor
        number = run.inject("supervisor_death")
        run.wait(lambda: run.supervisor is not before)
        successor = run.supervisor
        successor.inject(number, SUPERVISOR_DEATH)  # like a reconciler that got no answer
        run.wait_step(15)
        run.inject("agent_death", rank=2)
        run.wait(lambda: len(incidents(run)) == 1)
        run.wait_step(max(run.rows) + 5)
        run.inject("node_loss", rank=0)
        run.wait(lambda: bool(run.agents.lost_seats))
        (seat,) = run.agents.lost_seats
        run.agents.return_node(seat)
        assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
        assert_same_history(run, undisturbed)
        assert run.supervisor is successor
        causes = [cause for cause, _ in lost_ranks(run)]
        assert causes == ["agent_lost", "node_lost"], run.story()
