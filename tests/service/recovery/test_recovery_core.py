"""Single faults and their recovery on the simulated cluster."""

from __future__ import annotations

import pytest
from tests.support.simulation.core_config import core_config
from tests.support.simulation.simulated_jobs import closed, cluster, forming, members, running

from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_service.placement.world_shape import WorldShape
from holdfast_service.recovery.core import RecoveryCore
from holdfast_service.recovery.core_state import effects as fx
from holdfast_service.recovery.core_state import inputs
from holdfast_service.recovery.core_state.event_replay import Facts
from holdfast_service.recovery.core_state.stage_timer import Stage


def test_an_undisturbed_job_needs_one_attempt_and_no_incident() -> None:
    job = cluster()
    assert job.run().outcome == "SUCCEEDED"
    assert len(forming(job)) == 1
    assert not job.emitted(EventKind.INCIDENT_OPENED)
    phases = [data["phase"] for data in job.emitted(EventKind.PHASE)]
    assert phases == ["STARTING", "RUNNING", "FINISHING", "ENDED"]
    assert job.emitted(EventKind.CHECKPOINT_SAVED)[-1]["step"] == 30


def test_a_killed_rank_is_forked_on_its_agent_and_the_others_keep_their_processes() -> None:
    job = running(cluster())
    before = members(job.emitted(EventKind.ATTEMPT_RUNNING)[-1])
    job.kill_rank(1)
    assert job.run().outcome == "SUCCEEDED"
    after = members(job.emitted(EventKind.ATTEMPT_RUNNING)[-1])
    assert {rank for rank in range(4) if before[rank] != after[rank]} == {1}
    assert after[1][0] == before[1][0]
    (incident,) = closed(job)
    assert incident["cause"] == "worker_crash"
    assert incident["decision"] == "replace the worker"
    assert incident["steps_lost"] <= 1
    names = {"detect", "gather", "fence", "form", "restore", "first_step", "total"}
    assert set(incident["phases_s"]) == names
    assert 0 < incident["phases_s"]["total"] < 1


def test_a_lost_node_is_replaced_by_the_standby_from_its_partners_memory() -> None:
    job = running(cluster())
    job.kill_node("n0")
    assert job.run().outcome == "SUCCEEDED"
    event = forming(job)[-1]
    assert [member["agent"] for member in event["members"]] == ["n2", "n2", "n1", "n1"]
    assert event["restore"]["tiers"]["0"] == "partner_ram"
    assert event["restore"]["tiers"]["2"] == "own_ram"
    assert closed(job)[0]["steps_lost"] <= 1
    assert (
        closed(job)[0]["cause"] == "node_lost"
    )  # amended: the end of the agent was detected first


def test_two_ranks_at_once_are_one_incident() -> None:
    job = running(cluster())
    job.kill_rank(0)
    job.kill_rank(3)
    assert job.run().outcome == "SUCCEEDED"
    (incident,) = closed(job)
    assert {fault["rank"] for fault in incident["lost"]} == {0, 3}


def test_a_fault_during_a_recovery_joins_its_incident_and_is_counted() -> None:
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
    states = [data["state"] for data in job.emitted(EventKind.STANDBY)]
    assert states == ["ready", "lost", "warming", "ready"]


def test_without_a_replacement_the_job_waits_and_then_fails_with_that_reason() -> None:
    job = running(cluster(standbys=0, wait_for_replacement_s=7.0))
    job.kill_node("n1", back_after_s=None)
    end = job.run()
    assert (end.outcome, end.code) == ("FAILED", "no_replacement")
    assert "ranks 2, 3" in end.message
    (waiting,) = job.emitted(EventKind.WAITING)
    assert waiting["until"] == pytest.approx(job.now)
    assert job.core.next_deadline() is None


def test_a_returning_agent_restores_its_ranks_from_its_own_memory_segments() -> None:
    job = running(cluster(standbys=0))
    job.kill_agent("n1")
    assert job.run().outcome == "SUCCEEDED"
    tiers = forming(job)[-1]["restore"]["tiers"]
    assert set(tiers.values()) == {"own_ram"}
    assert closed(job)[0]["steps_lost"] <= 1


def test_a_user_error_is_retried_once_in_the_same_processes_and_uses_no_standby() -> None:
    job = cluster()
    job.user_error_at = 10
    end = job.run()
    assert (end.outcome, end.code, end.traceback) == ("FAILED", "user_error", "Traceback: ...")
    assert len(forming(job)) == 2
    assert members(forming(job)[0]) == members(forming(job)[1])
    (incident,) = closed(job)
    assert (incident["cause"], incident["decision"]) == ("user_error", "stop")


def test_an_error_that_does_not_recur_costs_one_incident() -> None:
    job = cluster()
    job.user_error_at, job.user_errors = 10, 1
    assert job.run().outcome == "SUCCEEDED"
    assert [incident["decision"] for incident in closed(job)] == ["re-form in place"]


def test_a_rank_that_dies_repeatedly_ends_the_job_by_its_budget() -> None:
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


def test_a_communication_error_without_deaths_re_forms_in_place() -> None:
    job = running(cluster())
    job.glitch()
    assert job.run().outcome == "SUCCEEDED"
    (incident,) = closed(job)
    assert (incident["cause"], incident["lost"]) == ("communication", [])
    assert incident["decision"] == "re-form in place"
    assert incident["phases_s"]["gather"] < 0.1, "every rank reported: nothing to wait for"


def test_an_attempt_that_loses_its_store_while_it_forms_is_formed_anew_at_once() -> None:
    job = running(cluster())
    job.kill_rank(1)
    job.run_until(lambda: job.core.stage is Stage.FORMING)
    job.lose_store("n0", for_s=5.0)
    assert job.run().outcome == "SUCCEEDED"
    (incident,) = closed(job)
    assert "communication" in incident["causes"]
    assert incident["phases_s"]["total"] < 0.5, "another host's store serves the next attempt"


def test_a_store_that_ends_once_all_ranks_have_met_ends_no_attempt() -> None:
    job = running(cluster())
    job.lose_store("n0", for_s=1.0)
    assert job.run().outcome == "SUCCEEDED"
    assert not closed(job)


def test_no_attempt_is_formed_before_a_store_answers() -> None:
    job = running(cluster(standbys=0))
    job.lose_store("n0", for_s=5.0)
    job.lose_store("n1", for_s=8.0)
    job.kill_rank(1)
    assert job.run().outcome == "SUCCEEDED"
    (incident,) = closed(job)
    assert 5.0 < incident["phases_s"]["total"] < 6.0
    assert incident["phases_s"]["decide"] > 4.0


def test_a_store_that_ends_between_the_fence_and_the_order_is_not_used() -> None:
    job = running(cluster(standbys=0))
    job.kill_rank(1)
    job.run_until(lambda: job.core.stage is Stage.FENCING)
    job.lose_store("n0", for_s=5.0)
    assert job.run().outcome == "SUCCEEDED"
    (incident,) = closed(job)
    assert incident["phases_s"]["total"] < 1.0


def test_a_worker_that_never_arrives_is_replaced_after_the_deadline() -> None:
    job = running(cluster(form_s=5.0))
    job.lose_next_worker("n0")
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


def test_no_second_world_forms_beside_a_world_that_may_still_step() -> None:
    job = running(cluster(standbys=2, wait_for_replacement_s=30.0, lease_s=0.0))
    job.cut_off("n0", for_s=12.0, noticed_after_s=1.0)
    job.cut_off("n1", for_s=12.0, noticed_after_s=1.0)
    job.run_until(lambda: job.core.stage is Stage.WAITING)
    assert "proof" in job.emitted(EventKind.WAITING)[0]["resource"]
    assert len(forming(job)) == 1
    assert job.run().outcome == "SUCCEEDED"


def test_too_few_nodes_end_the_start_with_a_named_reason() -> None:
    shapes = (WorldShape.of({"tp": 2}, 1),)
    core = RecoveryCore(core_config(shapes, start_s=30.0), now=0.0)
    assert core.next_deadline() == 30.0
    job = cluster()
    report = next(iter(job.agents.values())).report()
    core.handle(inputs.AgentUp(report), 1.0)
    end = core.handle(inputs.Tick(), 30.0)[-1]
    assert isinstance(end, fx.End)
    assert end.code == "start_timeout"
    assert "0 of 2 training nodes were ready within 30 s; not ready: n0" in end.message


def test_a_late_standby_does_not_delay_the_start() -> None:
    job = cluster(standbys=1, standby_wait_s=2.0)
    job.agents["n2"].alive = False
    assert job.run().outcome == "SUCCEEDED"
    assert forming(job)[0]["standbys"] == []


def test_a_resumed_job_waits_for_its_nodes_like_a_new_job() -> None:
    job = cluster(wait_for_replacement_s=0.1)
    job.core = RecoveryCore(job.config, job.now, Facts(attempt=3))
    assert job.run().outcome == "SUCCEEDED"
    assert forming(job)[0]["attempt"] == 4
