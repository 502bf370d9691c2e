"""Single stories of recovery, told on the simulated cluster."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.service.fake_cluster import row
from tests.service.simulated_cluster import SimulatedCluster

from holdfast_service.intervals import AutoTier
from holdfast_service.recovery import effects as fx
from holdfast_service.recovery import faults, inputs
from holdfast_service.recovery.config import RecoveryConfig
from holdfast_service.recovery.core import RecoveryCore
from holdfast_service.recovery.facts import Facts
from holdfast_service.recovery.state import Stage
from holdfast_service.registry import RemoteCheckpoint
from holdfast_service.reports import EventKind, Phase, StopKind
from holdfast_workers.messages import Origin, Place, Restore, SignalKind, Tier

ROW = row(1, 1)
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


def forming_by_reshard() -> SimulatedCluster:
    """Rank 3 is to be put together from parts of two ranks."""
    job = running(cluster())
    job.kill_rank(0)
    job.run_until(lambda: job.core.stage is Stage.FORMING)
    world = job.core._state.world
    assert world is not None
    origins = (
        Origin(0, "n0", Place.OWN, "n0", 1, "d"),
        Origin(1, "n1", Place.REPLICA, "n1", 1, "d"),
    )
    world.members[3].restore = Restore(Tier.RESHARD, 9, 1, mesh="dp_shard=1,tp=2", origins=origins)
    return job


def test_the_sources_of_a_failed_reshard_are_not_taken_again_in_their_agents_life() -> None:
    state = forming_by_reshard().core._state
    faults.distrust_source(state, 3, for_ever=False, why="not covered")
    assert {(one.agent, one.place, one.rank, one.attempt, one.step) for one in state.bad} == {
        ("n0", Place.OWN, 0, 1, 9),
        ("n1", Place.REPLICA, 1, 1, 9),
    }
    assert all(one.incarnation for one in state.bad)
    assert not state.saves.bad_uris


def test_of_a_failed_reshard_only_the_sources_that_failed_are_distrusted() -> None:
    job = forming_by_reshard()
    state = job.core._state
    agent = job.agents["n1"]
    job.signal(
        agent,
        SignalKind.SOURCES_LOST,
        job.core.attempt,
        rank=3,
        detail={"origins": [["n1", "replica", 1]], "message": "n1, rank 1: gone"},
    )
    job.run_until(lambda: bool(state.bad))
    faults.distrust_source(state, 3, for_ever=False, why="RestoreFailed: not covered")
    assert {(one.agent, one.place, one.rank) for one in state.bad} == {("n1", Place.REPLICA, 1)}
    assert all(one.incarnation for one in state.bad)


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
    first = job.agents["n0"].partners
    lost = first[0][0]
    job.kill_node(lost)
    (other,) = {"n1", "n2"} - {lost}
    job.run_until(lambda: job.agents["n0"].partners == {0: (other,), 1: (other,)})
    assert len(forming(job)) == 1


def test_a_step_that_is_not_finite_after_a_restore_sends_it_down_the_ladder() -> None:
    """Then an older step, and that one is good; the partners' copies of the first are no better."""
    job = running(cluster())
    newest = max(held.step for held in job.agents["n0"].memory[Place.OWN, 0])
    job.poisoned = {(place, step) for place in Place for step in range(newest, newest + 3)}
    job.kill_rank(1)
    job.run_until(lambda: len(closed(job)) == 1)
    (incident,) = closed(job)
    assert incident["causes"][:2] == ["worker_crash", "not_finite"]
    steps = [one["restore"]["step"] for one in forming(job)]
    assert steps[1] >= newest > steps[-1] > 0
    assert len(set(steps)) == len(steps)
    assert {(one["place"], one["step"]) for one in incident["bad"]} >= {("own", steps[1])}
    job.poisoned = set()
    assert job.run().outcome == "SUCCEEDED"


def test_a_damaged_remote_checkpoint_is_told_once_also_over_a_restart() -> None:
    job = running(cluster(steps=60), step=5)
    damaged = inputs.DamagedCheckpoint(3, "mem://3.1", "the manifest is torn")
    for _ in range(2):
        job.feed(inputs.RemoteCheckpoints((), (damaged,)))
    job.restart_supervisor()
    job.run_until(lambda: job.core.phase is Phase.RUNNING)
    job.feed(inputs.RemoteCheckpoints((), (damaged,)))
    (told,) = job.told(EventKind.CHECKPOINT_BAD)
    assert (told["step"], told["uri"], told["message"]) == (3, damaged.uri, damaged.why)


def test_a_remote_checkpoint_is_taken_where_no_state_in_memory_gives_a_finite_step() -> None:
    job = running(cluster(steps=60), step=25)
    job.remotes["mem://20.1"] = RemoteCheckpoint(20, 1, "mem://20.1")
    job.feed(inputs.RemoteCheckpoints(tuple(job.remotes.values())))
    job.poisoned = {(place, step) for place in Place for step in range(60)}
    job.kill_rank(1)
    job.run_until(lambda: len(closed(job)) == 1)
    assert forming(job)[-1]["restore"]["step"] == 20
    assert set(forming(job)[-1]["restore"]["tiers"].values()) == {"remote"}


def test_where_no_saved_state_gives_a_finite_step_the_job_ends_and_says_so() -> None:
    job = running(cluster())
    job.poisoned = {(place, step) for place in Place for step in range(60)}
    job.kill_rank(1)
    end = job.run()
    assert (end.outcome, end.code) == ("FAILED", "not_finite")
    assert "from every saved state" in end.message
    assert len(forming(job)) < 10


def test_a_step_that_is_not_finite_by_itself_is_the_users_and_no_state_is_blamed() -> None:
    job = cluster()
    job.not_finite_at = 12
    end = job.run()
    assert (end.outcome, end.code) == ("FAILED", "user_error")
    assert not any(one["bad"] for one in job.told(EventKind.INCIDENT_UPDATED))


def test_former_partners_free_what_they_hold_once_new_ones_have_caught_up() -> None:
    job = running(cluster(standbys=2, free_after_s=1.0))
    host = next(name for name, agent in job.agents.items() if 0 in agent.partners)
    (partner,) = job.agents[host].partners[0]
    job.kill_agent(partner, back_after_s=0.5)
    assert job.agents[partner].memory[Place.REPLICA, 0]
    job.run_until(lambda: len(forming(job)) == 2 and job.core.stage is Stage.RUNNING)
    assert job.agents[partner].memory
    job.run_until(lambda: not job.agents[partner].memory)
    placed = job.told(EventKind.MEMORY_PLACED)[-1]["partners"]
    assert partner not in {name for those in placed.values() for name in those}
    assert job.run().outcome == "SUCCEEDED"


def test_a_partner_lost_alone_is_made_up_for_and_the_other_stays() -> None:
    job = running(cluster(standbys=2, memory_copies=2))
    first = {name: dict(agent.partners) for name, agent in job.agents.items()}
    assert {len(those) for held in first.values() for those in held.values()} == {2}
    job.break_link(0)
    (host,) = [name for name, held in first.items() if 0 in held]
    gone, stays = first[host][0]
    (spare,) = set(job.agents) - {host, gone, stays}
    job.run_until(lambda: set(job.agents[host].partners[0]) == {stays, spare})
    assert len(job.told(EventKind.MEMORY_PLACED)) == 2
    assert len(forming(job)) == 1
    assert job.run().outcome == "SUCCEEDED"


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


def in_stage(stage: Stage) -> SimulatedCluster:
    job = running(cluster(standbys=0, wait_for_replacement_s=500.0))
    if stage is Stage.WAITING:
        job.kill_node("n1", back_after_s=None)
    elif stage not in (Stage.FINISHING, Stage.RUNNING):
        job.kill_rank(1)
    job.run_until(lambda: job.core.stage is stage)
    return job


STAGES = [one for one in Stage if one not in NOT_YET]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", StopKind)
def test_a_job_without_time_to_stop_ends_at_once_from_every_stage(
    stage: Stage, kind: StopKind
) -> None:
    job = in_stage(stage) if stage is not Stage.ASSEMBLING else cluster()
    job.remotes.setdefault("mem://2.1", RemoteCheckpoint(2, 1, "mem://2.1"))
    job.feed(inputs.RemoteCheckpoints(tuple(job.remotes.values())))
    job.feed(inputs.StopRequested(kind, "enough", deadline=job.now))
    assert job.ended is not None
    assert job.ended.outcome == {"cancel": "CANCELLED", "pause": "PAUSED"}[kind]
    assert job.ended.message.startswith("enough")
    job.feed(inputs.StopRequested(kind, "again", job.now))  # the cluster asserts: nothing follows


@pytest.mark.parametrize("stage", [one for one in STAGES if one is not Stage.FINISHING])
def test_a_job_that_is_cancelled_stops_by_its_deadline_from_every_stage(stage: Stage) -> None:
    job = cluster() if stage is Stage.ASSEMBLING else in_stage(stage)
    deadline = job.now + 20.0
    job.feed(inputs.StopRequested(StopKind.CANCEL, "enough", deadline))
    assert job.run().outcome == "CANCELLED"
    assert job.now <= deadline
    if stage is Stage.ASSEMBLING:
        assert job.committed == []


def test_a_cancelled_job_makes_one_more_step_and_saves_it() -> None:
    job = running(cluster(), step=13)
    job.feed(inputs.StopRequested(StopKind.CANCEL, "enough", job.now + 60))
    end = job.run()
    last = job.committed[-1][1]
    assert last < 30
    assert (end.outcome, end.step) == ("CANCELLED", last)
    assert job.told(EventKind.CHECKPOINT_SAVED)[-1]["step"] == last
    assert job.told(EventKind.ENDED)[0]["durable_step"] == last
    assert f"step {last}, is in the remote tier" in end.message
    (stopping,) = job.told(EventKind.JOB_STOPPING)
    assert (stopping["wanted"], stopping["step"]) == ("cancel", 13)
    assert not job.told(EventKind.INCIDENT_OPENED)


def test_to_ask_again_changes_nothing_and_a_nearer_deadline_hastens_the_end() -> None:
    job = running(cluster())
    job._finalize = lambda agent, effect: None  # type: ignore[method-assign]
    job.feed(inputs.StopRequested(StopKind.CANCEL, "enough", job.now + 60))
    for late in (60, 70):
        job.feed(inputs.StopRequested(StopKind.CANCEL, "enough", job.now + late))
    assert len(job.told(EventKind.JOB_STOPPING)) == 1
    job.feed(inputs.StopRequested(StopKind.CANCEL, "now", 0.0))
    assert job.ended is not None and job.ended.outcome == "CANCELLED"


def test_a_rank_that_dies_while_the_job_stops_is_recovered_and_the_last_state_is_saved() -> None:
    job = running(cluster(), step=13)
    job.feed(inputs.StopRequested(StopKind.PAUSE, "enough", job.now + 60))
    job.at(0.15, lambda: job.kill_rank(1))
    end = job.run()
    assert end.outcome == "PAUSED"
    assert job.told(EventKind.ENDED)[0]["durable_step"] == job.committed[-1][1] >= 13
    assert len(forming(job)) == 2


def test_a_pause_without_time_for_its_checkpoint_keeps_the_newest_that_there_is() -> None:
    job = running(cluster(), step=13)
    job.run_until(lambda: bool(job.told(EventKind.CHECKPOINT_SAVED)))
    job._finalize = lambda agent, effect: None  # type: ignore[method-assign]
    job.feed(inputs.StopRequested(StopKind.PAUSE, "enough", job.now + 5))
    end = job.run()
    assert (end.outcome, end.step) == ("PAUSED", 10)
    assert "step 10 is in the remote tier of its" in end.message


def test_a_pause_of_which_nothing_would_be_durable_is_undone_and_the_job_goes_on() -> None:
    job = cluster()
    job.remote_every = 0
    running(job, step=5)
    finalize, job._finalize = job._finalize, lambda agent, effect: None  # type: ignore[method-assign, assignment]
    job.feed(inputs.StopRequested(StopKind.PAUSE, "enough", job.now + 5))
    job.run_until(lambda: bool(job.told(EventKind.STOP_UNDONE)))
    job._finalize = finalize  # type: ignore[method-assign]
    assert job.run().outcome == "SUCCEEDED"
    assert [step for _, step in job.committed] == list(range(1, 31))
    assert not job.told(EventKind.INCIDENT_OPENED)


def test_a_supervisor_restarted_while_the_job_stops_goes_on_with_that() -> None:
    job = running(cluster(), step=13)
    job.feed(inputs.StopRequested(StopKind.PAUSE, "enough", job.now + 60))
    job.at(0.25, job.restart_supervisor)
    end = job.run()
    assert end.outcome == "PAUSED"
    assert job.told(EventKind.ENDED)[0]["durable_step"] == job.committed[-1][1]
    assert len(forming(job)) == 1


def test_a_cancel_of_a_job_that_pauses_ends_it_as_cancelled() -> None:
    job = running(cluster(), step=13)
    job.feed(inputs.StopRequested(StopKind.PAUSE, "rest", job.now + 60))
    job.feed(inputs.StopRequested(StopKind.CANCEL, "enough", job.now + 60))
    assert job.run().outcome == "CANCELLED"


def test_a_job_that_is_at_its_end_when_it_is_cancelled_succeeds() -> None:
    job = cluster()
    job.run_until(lambda: job.core.stage is Stage.FINISHING)
    job.feed(inputs.StopRequested(StopKind.CANCEL, "enough", job.now + 60))
    assert job.run().outcome == "SUCCEEDED"


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


def test_why_the_remote_tier_does_not_answer_is_said_while_it_is_awaited_and_at_the_end() -> None:
    job = cluster()
    silent = inputs.RemoteCheckpoints((), known=False, problem="it was silent for 10 s")
    job.feed(silent)
    job.run_until(lambda: job.core.stage is Stage.WAITING)
    denied = replace(silent, problem="s3://bucket: access denied")
    job.feed(denied)
    job.feed(denied)
    told = [data["resource"] for data in job.told(EventKind.WAITING)]
    assert ["silent" in told[0], "denied" in told[1], len(told)] == [True, True, 2]
    end = job.run()
    assert end.code == "no_replacement"
    assert "s3://bucket: access denied" in end.message


@pytest.mark.parametrize("kind", StopKind)
def test_a_stop_that_comes_before_a_running_attempt_is_taken_over_loses_nothing_of_it(
    kind: StopKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = running(cluster(), step=13)
    cut_short = classmethod(lambda cls, events: cls(attempt=1))
    with monkeypatch.context() as patched:
        patched.setattr(Facts, "from_events", cut_short)
        job.restart_supervisor()
    assert job.core.stage is Stage.ADOPTING
    job.feed(inputs.StopRequested(kind, "enough", job.now + 60))
    assert job.run().outcome in ("CANCELLED", "PAUSED")
    assert job.told(EventKind.ENDED)[0]["durable_step"] == job.committed[-1][1] >= 13


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
    assert core.handle(inputs.StopRequested(StopKind.CANCEL, "late", 0.0), job.now) == ()


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


def test_an_interval_is_chosen_once_it_is_measured_told_with_reasons_and_kept() -> None:
    job = running(cluster(auto=frozenset({AutoTier.MEMORY}), intervals=(2, 0)), step=5)
    rows = tuple(
        replace(
            ROW, step=step, memory_saved=step % 2 == 0, step_time_s=0.1 + 0.05 * (step % 2 == 0)
        )
        for step in range(1, 60)
    )
    job.feed(inputs.StepsMeasured(rows))
    (told,) = job.told(EventKind.CHECKPOINT_INTERVAL)
    assert (told["tier"], told["before"]) == ("memory", 2)
    assert told["every_steps"] > 2
    assert told["cost_s"] == pytest.approx(0.05)
    assert "a save costs 50.0 ms of training" in told["why"]
    job.feed(inputs.StepsMeasured(rows))
    job.restart_supervisor()
    job.kill_rank(1)
    job.run_until(lambda: 2 in job.orders)
    assert job.orders[2].intervals == (told["every_steps"], 0)
    assert len(job.told(EventKind.CHECKPOINT_INTERVAL)) == 1


def test_remote_saves_that_follow_on_one_another_are_made_more_rarely_to_be_measured() -> None:
    job = running(cluster(auto=frozenset({AutoTier.REMOTE}), intervals=(1, 10)), step=5)
    rows = tuple(replace(ROW, step=step, remote_saving=True) for step in range(1, 40))
    job.feed(inputs.StepsMeasured(rows))
    (told,) = job.told(EventKind.CHECKPOINT_INTERVAL)
    assert (told["before"], told["every_steps"], told["cost_s"]) == (10, 20, None)
    assert "last longer" in told["why"]


def test_a_remote_tier_that_does_not_answer_is_no_measure_and_no_failure_of_training() -> None:
    job = running(cluster(auto=frozenset({AutoTier.REMOTE}), intervals=(1, 10)), step=5)
    job.signal(
        job.agents["n0"],
        SignalKind.SHARD_DELAYED,
        1,
        rank=0,
        detail={"step": 10, "message": "no bucket"},
    )
    job.run_until(lambda: bool(job.told(EventKind.INCIDENT_OPENED)))
    rows = tuple(replace(ROW, step=step, remote_saving=True) for step in range(1, 40))
    job.feed(inputs.StepsMeasured(rows))
    assert not job.told(EventKind.CHECKPOINT_INTERVAL)
    assert job.core._state.restores == 0
    job.kill_rank(1)
    job.run_until(lambda: job.core._state.restores == 1)
    assert job.core._state.remote_restores == 0


def test_a_resumed_job_waits_for_its_nodes_as_one_that_starts() -> None:
    job = cluster(wait_for_replacement_s=0.1)
    job.core = RecoveryCore(job.config, job.now, Facts(attempt=3))
    assert job.run().outcome == "SUCCEEDED"
    assert forming(job)[0]["attempt"] == 4


def saving_at_ten(standbys: int = 1) -> SimulatedCluster:
    """Step 10 is on its way to the remote tier, and lies in the memory of two nodes already."""
    job = running(cluster(standbys))
    agents = job.agents.values()
    job.run_until(
        lambda: all(
            job.agents[partner].newest(Place.REPLICA, rank, 1) == 10
            for agent in agents
            for rank, partners in agent.partners.items()
            for partner in partners
        )
    )
    assert not any(agent.shards for agent in agents)
    return job


def saved(of: SimulatedCluster) -> list[tuple[int, int]]:
    return [(one["attempt"], one["step"]) for one in of.told(EventKind.CHECKPOINT_SAVED)]


def test_a_remote_save_is_completed_from_the_partners_when_a_node_dies() -> None:
    job = saving_at_ten()
    job.kill_node("n0")
    assert job.run().outcome == "SUCCEEDED"
    assert {(one.rank, one.place) for one in job.completions} == {
        (0, Place.REPLICA),
        (1, Place.REPLICA),
    }
    assert (1, 10) in saved(job)


def test_it_is_completed_while_the_job_waits_for_a_node_and_asked_for_once() -> None:
    job = saving_at_ten(standbys=0)
    job.kill_node("n0", back_after_s=20.0)
    job.run_until(lambda: (1, 10) in saved(job))
    assert job.core.stage is Stage.WAITING
    assert job.run().outcome == "SUCCEEDED"
    assert sorted(one.rank for one in job.completions) == [0, 1]


def test_nobody_is_asked_for_a_part_of_what_cannot_be_completed() -> None:
    job = saving_at_ten()
    for agent in job.agents.values():
        agent.memory.pop((Place.REPLICA, 1), None)
    job.kill_node("n0")
    assert job.run().outcome == "SUCCEEDED"
    assert not job.completions
    assert (1, 10) not in saved(job)


def test_a_save_that_goes_on_at_its_own_node_is_nobody_elses() -> None:
    job = saving_at_ten()
    job.kill_rank(1)
    assert job.run().outcome == "SUCCEEDED"
    assert not job.completions
    assert (1, 10) in saved(job)
