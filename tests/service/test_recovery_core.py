"""Single stories of recovery, told on the simulated cluster."""

from __future__ import annotations

from typing import Any

import pytest
from tests.service.simulated_cluster import SimulatedCluster

from holdfast_service.recovery import effects as fx
from holdfast_service.recovery import inputs
from holdfast_service.recovery.config import RecoveryConfig
from holdfast_service.recovery.core import RecoveryCore
from holdfast_service.recovery.facts import Facts
from holdfast_service.recovery.state import Stage
from holdfast_service.reports import EventKind, Phase
from holdfast_workers.messages import SignalKind

NOT_YET = (Stage.ENDED, Stage.ADOPTING)


def cluster(standbys: int = 1, **changes: Any) -> SimulatedCluster:
    fields: dict[str, Any] = {
        "mesh": {"dp_shard": 2, "tp": 2},
        "world_size": 4,
        "workers_per_node": 2,
        "standby_nodes": standbys,
        "steps": 30,
        **changes,
    }
    return SimulatedCluster(RecoveryConfig(**fields))


def running(of: SimulatedCluster, step: int = 10) -> SimulatedCluster:
    of.run_until(lambda: of.core.stage is Stage.RUNNING and of.core.committed >= step)
    return of


def closed(of: SimulatedCluster) -> list[dict[str, Any]]:
    return of.told(EventKind.INCIDENT_CLOSED)


def forming(of: SimulatedCluster) -> list[dict[str, Any]]:
    return of.told(EventKind.ATTEMPT_FORMING)


def members(event: dict[str, Any]) -> dict[int, tuple[str, str | None]]:
    return {one["rank"]: (one["agent"], one["worker"]) for one in event["members"]}


def test_an_undisturbed_job_needs_one_attempt_and_no_incident() -> None:
    job = cluster()
    assert job.run().outcome == "SUCCEEDED"
    assert len(forming(job)) == 1
    assert not job.told(EventKind.INCIDENT_OPENED)
    phases = [data["phase"] for data in job.told(EventKind.PHASE)]
    assert phases == ["STARTING", "RUNNING", "FINISHING", "ENDED"]
    assert job.told(EventKind.CHECKPOINT_SAVED)[-1]["step"] == 30


def test_a_killed_rank_is_forked_on_its_agent_and_the_others_keep_their_processes() -> None:
    job = running(cluster())
    before = members(job.told(EventKind.ATTEMPT_RUNNING)[-1])
    job.kill_rank(1)
    assert job.run().outcome == "SUCCEEDED"
    after = members(job.told(EventKind.ATTEMPT_RUNNING)[-1])
    assert {rank for rank in range(4) if before[rank] != after[rank]} == {1}
    assert after[1][0] == before[1][0]
    (incident,) = closed(job)
    assert incident["cause"] == "worker_crash"
    assert incident["decision"] == "replace the worker"
    assert incident["steps_lost"] <= 1
    names = {"detect", "gather", "fence", "decide", "form", "restore", "first_step", "total"}
    assert set(incident["phases_s"]) == names
    assert 0 < incident["phases_s"]["total"] < 1


def test_a_lost_node_is_replaced_by_the_standby_from_its_partners_memory() -> None:
    job = running(cluster())
    job.kill_node("n0")
    assert job.run().outcome == "SUCCEEDED"
    event = forming(job)[-1]
    assert [one["agent"] for one in event["members"]] == ["n2", "n2", "n1", "n1"]
    assert event["restore"]["tiers"]["0"] == "partner_ram"
    assert event["restore"]["tiers"]["2"] == "own_ram"
    assert closed(job)[0]["steps_lost"] <= 1
    assert closed(job)[0]["cause"] == "node_lost"  # amended: the agent's end was seen first


def test_two_ranks_at_once_are_one_incident() -> None:
    job = running(cluster())
    job.kill_rank(0)
    job.kill_rank(3)
    assert job.run().outcome == "SUCCEEDED"
    (incident,) = closed(job)
    assert {one["rank"] for one in incident["lost"]} == {0, 3}


def test_a_fault_during_the_recovery_is_folded_into_its_incident_and_counted() -> None:
    job = running(cluster())
    job.kill_rank(0)
    job.run_until(lambda: job.core.stage is Stage.FORMING)
    job.kill_node("n1")
    assert job.run().outcome == "SUCCEEDED"
    (incident,) = closed(job)
    assert len(incident["failures"]) == 2
    assert {"worker_crash", "node_lost"} <= set(incident["causes"])


def test_the_loss_of_a_standby_costs_no_attempt() -> None:
    job = running(cluster())
    job.kill_agent("n2")
    assert job.run().outcome == "SUCCEEDED"
    assert len(forming(job)) == 1
    states = [data["state"] for data in job.told(EventKind.STANDBY)]
    assert states == ["ready", "lost", "warming", "ready"]


def test_without_a_replacement_the_job_waits_and_then_ends_with_that_reason() -> None:
    job = running(cluster(standbys=0, wait_for_replacement_s=7.0))
    job.kill_node("n1", back_after_s=None)
    end = job.run()
    assert (end.outcome, end.code) == ("FAILED", "no_replacement")
    assert "ranks 2, 3" in end.message
    (waiting,) = job.told(EventKind.WAITING)
    assert waiting["until"] == pytest.approx(job.now)
    assert job.core.next_deadline() is None


def test_an_agent_that_comes_back_fills_the_hole_with_what_its_segments_kept() -> None:
    job = running(cluster(standbys=0))
    job.kill_agent("n1")
    assert job.run().outcome == "SUCCEEDED"
    tiers = forming(job)[-1]["restore"]["tiers"]
    assert set(tiers.values()) == {"own_ram"}
    assert closed(job)[0]["steps_lost"] <= 1


def test_a_users_error_is_tried_once_more_in_the_same_processes_and_burns_no_standby() -> None:
    job = cluster()
    job.user_error_at = 10
    end = job.run()
    assert (end.outcome, end.code, end.traceback) == ("FAILED", "user_error", "Traceback: ...")
    assert len(forming(job)) == 2
    assert members(forming(job)[0]) == members(forming(job)[1])
    (incident,) = closed(job)
    assert (incident["cause"], incident["decision"]) == ("user_error", "stop")


def test_an_error_that_does_not_come_back_costs_one_incident() -> None:
    job = cluster()
    job.user_error_at, job.user_errors = 10, 1
    assert job.run().outcome == "SUCCEEDED"
    assert [one["decision"] for one in closed(job)] == ["re-form in place"]


def test_a_rank_that_dies_again_and_again_is_ended_by_the_budget() -> None:
    job = cluster(max_failures=3, steps=200)

    def again() -> None:
        job.kill_rank(2)
        job.at(1.0, again)

    job.at(2.0, again)
    end = job.run()
    assert (end.outcome, end.code) == ("FAILED", "too_many_failures")
    assert "rank 2" in end.message
    assert "SIGKILL" in end.message
    assert len(forming(job)) == 4


def test_a_glitch_that_killed_nobody_re_forms_in_place() -> None:
    job = running(cluster())
    job.glitch()
    assert job.run().outcome == "SUCCEEDED"
    (incident,) = closed(job)
    assert (incident["cause"], incident["lost"]) == ("communication", [])
    assert incident["decision"] == "re-form in place"
    assert incident["phases_s"]["gather"] < 0.1, "every rank spoke: nothing to wait for"


def test_a_copy_that_cannot_be_loaded_is_passed_over_for_the_next() -> None:
    job = running(cluster())
    job.forget_copies("n0")
    job.kill_rank(2)
    assert job.run().outcome == "SUCCEEDED"
    first, second = forming(job)[1:3]
    assert first["restore"]["sources"]["0"] == "n0"
    assert second["restore"]["sources"]["0"] == "n1"
    assert "bad_state" in closed(job)[0]["causes"]


def test_a_worker_that_never_arrives_is_replaced_after_the_deadline() -> None:
    job = running(cluster(form_timeout_s=5.0))
    job.stick("n0")
    job.kill_rank(3)
    assert job.run().outcome == "SUCCEEDED"
    (incident,) = closed(job)
    assert "no_progress" in incident["causes"]
    assert 5.0 < incident["phases_s"]["total"] < 7.0


def test_an_agent_that_does_not_answer_the_fence_is_removed_and_replaced() -> None:
    job = running(cluster(fence_timeout_s=2.0))
    job.cut_off("n1", for_s=60.0, noticed_after_s=50.0)
    job.kill_rank(0)
    job.run_until(lambda: len(closed(job)) == 1)
    (incident,) = closed(job)
    assert incident["decision"] == "replace the node"
    assert 1.99 < incident["phases_s"]["fence"] < 2.5
    assert members(forming(job)[-1])[2][0] == "n2"
    assert job.run().outcome == "SUCCEEDED"


def test_nobody_forms_a_second_world_beside_one_that_may_still_live() -> None:
    job = running(cluster(standbys=2, wait_for_replacement_s=30.0))
    job.cut_off("n0", for_s=12.0, noticed_after_s=1.0)
    job.cut_off("n1", for_s=12.0, noticed_after_s=1.0)
    job.run_until(lambda: job.core.stage is Stage.WAITING)
    assert "proof" in job.told(EventKind.WAITING)[0]["resource"]
    assert len(forming(job)) == 1
    assert job.run().outcome == "SUCCEEDED"


def test_a_lost_standby_partner_is_replaced_while_training_goes_on() -> None:
    job = running(cluster(standbys=2, mesh={"tp": 2}, world_size=2))
    assert job.agents["n0"].partners == {0: "n1", 1: "n2"}
    job.kill_node("n1")
    job.run_until(lambda: job.agents["n0"].partners == {0: "n2", 1: "n2"})
    assert len(forming(job)) == 1


def test_the_last_checkpoint_is_finalized_by_another_agent_if_the_first_dies() -> None:
    job = cluster()
    job.run_until(lambda: bool(job.core._state.saves.pending) and job.core.committed == 30)
    (pending,) = job.core._state.saves.pending.values()
    assert pending.agent is not None
    job.kill_agent(pending.agent)
    assert job.run().outcome == "SUCCEEDED"


def test_a_shard_of_the_last_step_that_failed_is_saved_by_a_new_attempt() -> None:
    job = cluster()
    job.run_until(lambda: job.core.committed >= 25)
    job.shard_failures = 1
    assert job.run().outcome == "SUCCEEDED"
    assert closed(job)[-1]["cause"] == "checkpoint_failed"


def test_without_the_last_checkpoint_the_job_has_not_succeeded() -> None:
    job = cluster(finish_timeout_s=3.0)
    job.run_until(lambda: job.core.committed >= 25)
    job._finalize = lambda agent, effect: None  # type: ignore[method-assign]
    end = job.run()
    assert (end.outcome, end.code) == ("FAILED", "final_checkpoint")


@pytest.mark.parametrize("stage", [one for one in Stage if one not in NOT_YET])
def test_cancel_ends_the_job_from_every_stage(stage: Stage) -> None:
    job = cluster(standbys=0)
    if stage is not Stage.ASSEMBLING:
        if stage not in (Stage.FINISHING, Stage.RUNNING):
            job.at(2.0, lambda: job.kill_node("n1", back_after_s=None))
        job.run_until(lambda: job.core.stage is stage)
    job.feed(inputs.CancelRequested("enough"))
    assert job.ended is not None
    assert (job.ended.outcome, job.ended.message) == ("CANCELLED", "enough")
    job.feed(inputs.CancelRequested("again"))  # the cluster asserts that nothing follows


def test_too_few_nodes_end_the_start_with_a_named_reason() -> None:
    core = RecoveryCore(RecoveryConfig({"tp": 2}, 2, 1, 0, steps=10, start_timeout_s=30.0), now=0.0)
    assert core.next_deadline() == 30.0
    job = cluster()
    report = next(iter(job.agents.values())).report()
    core.handle(inputs.AgentUp(report), 1.0)
    end = core.handle(inputs.Tick(), 30.0)[-1]
    assert isinstance(end, fx.End)
    assert end.code == "start_timeout"
    assert "0 of 2 training nodes were ready within 30 s; not ready: n0" in end.message


def test_a_standby_that_is_late_does_not_hold_up_the_start() -> None:
    job = cluster(standbys=1, standby_wait_s=2.0)
    job.agents["n2"].alive = False
    assert job.run().outcome == "SUCCEEDED"
    assert forming(job)[0]["standbys"] == []


def test_a_restarted_supervisor_adopts_the_running_attempt_without_touching_it() -> None:
    job = running(cluster())
    job.restart_supervisor()
    assert job.core.phase is Phase.RUNNING
    assert job.run().outcome == "SUCCEEDED"
    assert len(forming(job)) == 1
    assert [step for _, step in job.committed] == list(range(1, 31)), "it cost no step"
    assert not job.told(EventKind.INCIDENT_OPENED)


def test_a_restarted_supervisor_finds_the_fault_of_meanwhile() -> None:
    job = running(cluster())
    job.restart_supervisor()
    job.kill_rank(2)
    assert job.run().outcome == "SUCCEEDED"
    (incident,) = closed(job)
    assert incident["cause"] == "worker_crash"
    attempts = [event["attempt"] for event in forming(job)]
    assert attempts == [1, 2]


def test_a_supervisor_that_dies_amid_a_recovery_leaves_one_incident() -> None:
    job = running(cluster())
    job.kill_node("n0")
    job.run_until(lambda: job.core.stage is Stage.FENCING)
    job.restart_supervisor()
    assert job.run().outcome == "SUCCEEDED"
    numbers = {data["incident"] for data in job.told(EventKind.INCIDENT_OPENED)}
    assert numbers == {1}
    assert closed(job)[0]["restored_step"] is not None


def test_a_journal_that_was_cut_short_does_not_cost_the_running_attempt() -> None:
    job = running(cluster())
    del job.events[:-1]
    job.events[0] = job.events[0].__class__(99, job.now, EventKind.STANDBY, {})
    real = Facts.from_events
    try:
        Facts.from_events = classmethod(  # type: ignore[method-assign, assignment]
            lambda cls, events: cls(attempt=1)
        )
        job.restart_supervisor()
    finally:
        Facts.from_events = real  # type: ignore[method-assign]
    assert job.run().outcome == "SUCCEEDED"
    assert forming(job) == []


def test_an_ended_job_stays_ended_after_a_restart() -> None:
    job = cluster()
    job.run()
    facts = Facts.from_events(job.events)
    core = RecoveryCore(job.config, job.now, facts)
    assert (core.phase, core.next_deadline()) == (Phase.ENDED, None)
    assert core.handle(inputs.CancelRequested("late"), job.now) == ()


def test_signals_of_an_older_attempt_change_nothing() -> None:
    job = running(cluster())
    job.glitch()
    job.run_until(lambda: job.core.stage is Stage.RUNNING and job.core.attempt == 2)
    job.restart_supervisor()  # replays nothing, but adopts attempt 2
    old = job.agents["n0"]
    worker = next(iter(old.workers.values()))
    job.run_until(lambda: job.core.stage is Stage.RUNNING)
    detail = {
        "error": {
            "kind": "communication",
            "type": "E",
            "message": "late",
            "traceback": "",
            "step": 3,
        }
    }
    job.signal(old, SignalKind.WORKER_FAILED, 1, rank=0, worker=worker.name, detail=detail)
    assert job.run().outcome == "SUCCEEDED"
    assert len(forming(job)) == 2
