"""Injected faults in a running job: each happens once, to its victim, and the job ends with the
undisturbed run's bits."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.chaos.conftest import STEPS, Undisturbed
from tests.support.nodes.history_proof import assert_same_history, incidents
from tests.support.nodes.supervised import SupervisedRun, small_training, supervised
from tests.support.ranks.step_log import FOLDER, PACE

from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_workers.fault_injection.kinds import FaultKind, Injection
from holdfast_workers.spec import CheckpointSpec, MemoryTierSpec, RemoteTierSpec

pytestmark = pytest.mark.chaos
SUPERVISOR_DEATH = Injection(FaultKind.SUPERVISOR_DEATH)


def lost_ranks(run: SupervisedRun) -> list[tuple[str, list[int]]]:
    return [
        (incident["cause"], lost["ranks"])
        for incident in incidents(run)
        for lost in incident["lost"]
        if lost["cause"] == incident["cause"]
    ]


def fired(run: SupervisedRun, text: str) -> int:
    return sum("injected fault" in line and text in line for line in run.logs)


def test_each_fault_happens_once_to_its_rank_at_its_step_and_phase(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """Two faults are requested early and stay pending through a recovery and a new process."""
    with supervised(tmp_path, small_training(STEPS), standbys=0) as run:
        run.wait_step(2)
        run.inject("exit", rank=1, at_step=30, phase="backward", exit_code=3)
        run.inject("kill", rank=1, phase="restore")  # in the recovery from the next fault
        run.inject("kill", rank=1, at_step=20)
        run.wait_step(40)
        run.inject("abort", rank=2)
        assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
        assert_same_history(run, undisturbed)
        assert lost_ranks(run)[-1] == ("worker_crash", [2]), run.story()
        assert {("worker_crash", (1,))} == {(c, tuple(r)) for c, r in lost_ranks(run)[:-1]}
        assert [fired(run, text) for text in ("exit_code=3", "phase=restore", "at_step=20")] == [
            *(1, 1, 1)
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


def test_an_unavailable_and_then_full_remote_tier_costs_no_step(
    tmp_path: Path, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paced so that both faults fit into the run."""
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setenv(PACE, "0.05")
    checkpoint = CheckpointSpec(
        memory=MemoryTierSpec(every_steps=1), remote=RemoteTierSpec(every_steps=3, keep=3)
    )
    paced = "tests.support.ranks.step_log:LogsSteps"
    training = small_training(STEPS, checkpoint=checkpoint, recipe=paced)
    with supervised(tmp_path, training, standbys=0) as run:
        run.wait_step(2)
        run.inject("remote_down", duration_s=1.5)
        run.wait(lambda: len(run.of(EventKind.INCIDENT_OPENED)) == 1)
        run.wait(lambda: len(incidents(run)) == 1)
        run.inject("disk_full", duration_s=1.5)
        assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
        assert_same_history(run, undisturbed)
        assert {row.attempt for row in run.all_rows} == {1}
        first, second = (str(incident["evidence"]) for incident in incidents(run))
        assert "it does not answer" in first and "No space left" in second
        assert {incident["cause"] for incident in incidents(run)} == {"remote_unavailable"}
