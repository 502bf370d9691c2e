"""SIGKILL of ranks in every phase of a step, of an attempt and of a recovery: the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.chaos.conftest import STEPS, Undisturbed
from tests.support.nodes.history_proof import (
    assert_each_sample_once,
    assert_same_history,
    incidents,
    not_fired,
    processes,
    slept_on,
)
from tests.support.nodes.supervised import small_training, supervised
from tests.support.ranks.recipes import DiesReadingAhead

from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_workers.agent.reforming import Reform
from holdfast_workers.spec import CheckpointSpec, MemoryTierSpec, RemoteTierSpec

pytestmark = pytest.mark.chaos


def kill(point: str, rank: int | None = None, step: int | None = None) -> dict[str, Any]:
    return {"point": point, "rank": rank, "step": step, "action": "kill"}


IN_EVERY_PHASE_OF_A_STEP = [
    kill("agree", 1, 1),  # the very first step
    kill("forward", 0, 5),
    kill("load", 3, 7),
    kill("backward", 1, 9),
    kill("agree", 2, 13),
    kill("optimizer", 3, 17),
    kill("checkpoint", 0, 21),
    kill("memory", 1, 25),  # in the middle of the copy
    kill("committed", 2, 29),  # while its state is being replicated
    kill("forward", 0, 33),  # two at once
    kill("forward", 3, 33),
    kill("save", 3),  # before and after the handover of a remote save, whichever is made first:
    kill("saved", 0),  # quick steps pass over a save while another is under way
    kill("agree", 2, STEPS + 1),  # after the last step, before its digest is known
    kill("restore", 0),  # these two fire in the recoveries from earlier kills
    kill("rendezvous", 3),
]
WITH_NEW_PROCESSES = [kill("backward", 1, 9), kill("memory", 1, 25), kill("saved", 0)]
PLANS = {Reform.IN_PLACE: (IN_EVERY_PHASE_OF_A_STEP, 12), Reform.FORK: (WITH_NEW_PROCESSES, 2)}
"""The kills, and the least number of ranks seen as lost: of two at once, one may hide the other.
That ranks may die in every phase is shown once; how the others go on, for each way."""


def with_remote(every_steps: int) -> CheckpointSpec:
    return CheckpointSpec(
        memory=MemoryTierSpec(every_steps=1), remote=RemoteTierSpec(every_steps=every_steps, keep=3)
    )


@pytest.mark.cell("P2", "rank")
@pytest.mark.cell("P6", "rank")
@pytest.mark.parametrize("reform", Reform)
def test_a_rank_may_die_in_any_phase_of_a_step(
    tmp_path: Path, undisturbed: Undisturbed, reform: Reform
) -> None:
    plan, least_lost = PLANS[reform]
    training = small_training(STEPS, checkpoint=with_remote(10))
    with supervised(tmp_path, training, standbys=0, chaos=plan, reform=reform) as run:
        end = run.wait_end()
        assert end["outcome"] == "SUCCEEDED", run.story()
        assert not not_fired(run, plan)
        assert_same_history(run, undisturbed)
        lost = {(lost["attempt"], lost["rank"]) for i in incidents(run) for lost in i["lost"]}
        assert len(lost) >= least_lost, run.story()
        assert max(incident["steps_lost"] for incident in incidents(run)) <= 1


def test_a_rank_may_die_while_it_reads_the_next_step(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    training = small_training(STEPS, recipe="tests.support.ranks.recipes:DiesReadingAhead")
    with supervised(tmp_path, training, standbys=0) as run:
        assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
        assert_same_history(run, undisturbed)
        (incident,) = incidents(run)
        assert DiesReadingAhead.RANK in {lost["rank"] for lost in incident["lost"]}, run.story()
        assert_each_sample_once(small_training(STEPS), run.rows, tmp_path)


def test_a_slow_copy_delays_the_step_and_never_tears_the_state(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """Copies that outlast the next backward; kills in the middle of them."""
    plan = [kill("memory", 1, 7), kill("backward", 2, 12), kill("optimizer", 0, 16)]
    training = small_training(STEPS, recipe="tests.support.ranks.recipes:CopiesSlowly")
    with supervised(tmp_path, training, standbys=0, chaos=plan) as run:
        assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
        assert not not_fired(run, plan)
        assert_same_history(run, undisturbed)
        assert max(incident["steps_lost"] for incident in incidents(run)) <= 1
        assert run.rows[STEPS].checkpoint_wait_s > 0
        assert run.rows[STEPS].protected_step >= STEPS - 2  # the last copy may be under way


def test_survivors_keep_their_processes(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """Also the regression test for stale gradients: each kill comes in the middle of a backward.

    A survivor is killed only if gloo lost its wake-up (see `WorkerPool`), and the incident records
    this. The number of recoveries without such a kill shows that it is the exception.
    """
    plan = [kill("backward", 1, step) for step in (12, 22, 32, 42)]
    with supervised(tmp_path, small_training(STEPS), standbys=0, chaos=plan) as run:
        assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
        assert not not_fired(run, plan)
        assert_same_history(run, undisturbed)
        worlds = processes(run)
        assert len(worlds) == len(incidents(run)) + 1 == len(plan) + 1
        undivided = 0
        for before, after, incident in zip(worlds, worlds[1:], incidents(run), strict=False):
            replaced = {rank for rank in before if before[rank] != after[rank]}
            stuck = slept_on(incident)
            assert 1 in replaced
            assert len(replaced) <= 1 + stuck, run.story()
            undivided += replaced == {1}
        assert undivided >= 2, run.story()


def test_ranks_may_die_while_an_attempt_forms_and_during_that_recovery(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    plan = [
        kill("forming", 2),
        kill("rendezvous", 1),
        kill("restore", 3),
        kill("backward", 0, 20),
        kill("restore", 0),  # these two fire in the recoveries from earlier kills
        kill("rendezvous", 3),
    ]
    with supervised(tmp_path, small_training(STEPS), standbys=0, chaos=plan) as run:
        end = run.wait_end()
        assert end["outcome"] == "SUCCEEDED", run.story()
        assert not not_fired(run, plan)
        assert_same_history(run, undisturbed)


def test_a_remote_save_survives_its_saver_and_its_publisher(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    plan = [kill("saver", 1, 20), kill("finalizer")]
    training = small_training(STEPS, checkpoint=with_remote(20))
    with supervised(tmp_path, training, standbys=0, chaos=plan) as run:
        assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
        assert not not_fired(run, plan)
        assert not incidents(run)  # training was not affected
        assert_same_history(run, undisturbed)
        saved = sorted(path.name for path in run.remote_root.glob("step-*"))
        assert f"step-{STEPS:08d}.attempt-1" in saved


def test_a_stopped_survivor_is_killed_rather_than_waited_for(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    plan = [
        {"point": "backward", "rank": 2, "step": 20, "action": "stop"},
        kill("backward", 1, 20),
    ]
    with supervised(tmp_path, small_training(STEPS), standbys=0, chaos=plan) as run:
        assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
        assert not not_fired(run, plan)
        assert_same_history(run, undisturbed)


@pytest.mark.cell("P3", "rank")
def test_every_sample_is_used_exactly_once(undisturbed: Undisturbed, tmp_path: Path) -> None:
    assert_each_sample_once(small_training(STEPS), undisturbed.rows, tmp_path)


def test_a_restore_that_yields_no_finite_step_uses_another_source(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    training = small_training(STEPS, recipe="tests.support.ranks.recipes:NotFiniteInAttemptTwo")
    with supervised(tmp_path, training, standbys=0) as run:
        run.wait_step(15)
        run.kill(1)
        assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
        assert_same_history(run, undisturbed)
        (incident,) = incidents(run)
        assert {"worker_crash", "not_finite"} <= set(incident["causes"]), run.story()
        second, third = (forming["restore"] for forming in run.of(EventKind.ATTEMPT_FORMING)[1:])
        assert (second["step"], second["sources"]) != (third["step"], third["sources"])
        assert {bad["step"] for bad in incident["bad"]} == {second["step"]}
