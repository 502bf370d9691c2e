"""A job with several meshes: it trains on a smaller one while nodes are missing, then grows."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

from tests.support.simulation.simulated_cluster import SimulatedCluster
from tests.support.simulation.simulated_jobs import closed, cluster, forming, members, running

from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_service.placement.world_shape import WorldShape
from holdfast_service.policy.quarantine import NodeStanding
from holdfast_service.recovery.core_state.inputs import FaultRequested
from holdfast_service.recovery.core_state.stage_timer import Stage
from holdfast_workers.fault_injection.kinds import Injection
from holdfast_workers.protocol.commands import CommandKind

SHAPES = tuple(WorldShape.of({"dp_shard": ranks}, 1) for ranks in (4, 3, 2))


def elastic(**changes: Any) -> SimulatedCluster:
    options: dict[str, Any] = {"standbys": 0, "shapes": SHAPES, "steps": 400, "grow_after_s": 2.0}
    return cluster(**(options | changes))


def world_sizes(job: SimulatedCluster) -> list[int]:
    return [event["world_size"] for event in forming(job)]


def test_a_lost_node_without_a_replacement_shrinks_the_world_at_once() -> None:
    job = running(elastic())
    job.kill_node("n3", back_after_s=None)
    job.run_until(lambda: len(closed(job)) == 1)
    (incident,) = closed(job)
    assert incident["decision"] == "shrink to a smaller mesh"
    assert "3 ranks (dp_shard 3) on 3 nodes in place of 4 (dp_shard 4) on 4" in incident["reason"]
    assert incident["phases_s"]["total"] < 2.0
    assert world_sizes(job) == [4, 3]
    assert set(incident["tiers"].values()) == {"reshard"}
    assert not job.emitted(EventKind.WAITING)
    assert job.run().outcome == "SUCCEEDED"


def test_the_world_grows_when_the_node_has_been_back_for_a_while() -> None:
    job = running(elastic())
    job.kill_node("n3", back_after_s=5.0)
    job.run_until(lambda: len(closed(job)) == 2)
    shrunk, grown = closed(job)
    assert (shrunk["cause"], grown["cause"]) == ("node_lost", "resize")
    assert grown["decision"] == "grow to a larger mesh"
    assert grown["opened_at"] - shrunk["closed_at"] >= 5.0
    assert grown["failures"] == []
    assert job.run().outcome == "SUCCEEDED"
    assert world_sizes(job) == [4, 3, 4]


def test_a_node_that_comes_and_goes_is_followed_ever_more_rarely() -> None:
    job = running(elastic(steps=3000, max_failures=1000))

    def flap() -> None:
        job.kill_node("n3", back_after_s=1.0)
        job.at(8.0, flap)

    job.at(0.0, flap)
    job.run_until(lambda: job.core.committed >= 1500)
    assert world_sizes(job).count(4) <= 4


def test_two_nodes_lost_shrink_to_the_smallest_mesh_and_a_third_makes_the_job_wait() -> None:
    job = running(elastic(wait_for_replacement_s=60.0))
    job.kill_node("n3", back_after_s=None)
    job.kill_node("n2", back_after_s=None)
    job.run_until(lambda: world_sizes(job)[-1] == 2 and len(closed(job)) == 1)
    job.kill_node("n1", back_after_s=30.0)
    assert job.run().outcome == "SUCCEEDED"
    assert job.emitted(EventKind.WAITING)


def test_a_standby_takes_the_ranks_before_the_world_shrinks() -> None:
    job = running(elastic(standbys=1))
    job.kill_node("n3", back_after_s=None)
    assert job.run().outcome == "SUCCEEDED"
    assert world_sizes(job) == [4, 4]


def test_a_draining_node_is_left_for_a_smaller_mesh_before_its_deadline() -> None:
    job = running(elastic())
    job.drain_node("n3", in_s=20.0)
    job.run_until(lambda: len(closed(job)) == 1)
    (incident,) = closed(job)
    assert incident["cause"] == "preempted"
    assert incident["decision"] == "shrink to a smaller mesh"
    assert job.agents["n3"].alive
    assert job.run().outcome == "SUCCEEDED"


def test_a_cordoned_node_is_left_and_used_again_after_its_check() -> None:
    job = running(elastic())
    job.set_aside("n3", 10.0, NodeStanding.CORDONED)
    assert job.run().outcome == "SUCCEEDED"
    assert world_sizes(job) == [4, 3, 4]


def test_a_start_with_too_few_nodes_trains_on_the_smaller_mesh_after_its_wait() -> None:
    job = elastic(assemble_wait_s=5.0)
    job.agents["n3"].never_ready = True
    assert job.run().outcome == "SUCCEEDED"
    assert world_sizes(job) == [3]


def test_a_restarted_supervisor_adopts_a_shrunk_world() -> None:
    job = running(elastic())
    job.kill_node("n3", back_after_s=None)
    job.run_until(lambda: len(closed(job)) == 1)
    job.restart_supervisor()
    assert job.run().outcome == "SUCCEEDED"
    assert world_sizes(job) == [4, 3]


def test_checkpoints_are_complete_with_the_ranks_of_their_own_attempt() -> None:
    job = elastic(steps=60)
    job.remote_every = 5
    running(job)
    job.kill_node("n3", back_after_s=None)
    assert job.run().outcome == "SUCCEEDED"
    saved = job.emitted(EventKind.CHECKPOINT_SAVED)
    meshes = Counter(event["mesh"]["dp_shard"] for event in saved)
    assert meshes[4] and meshes[3]


def test_an_ordered_size_is_taken_at_once_and_the_other_seats_are_given_back() -> None:
    job = running(elastic(steps=2000))
    job.order_size(2)
    job.run_until(lambda: bool(job.given_back))
    (incident,) = closed(job)
    assert incident["decision"] == "shrink to a smaller mesh"
    assert incident["evidence"][0] == "at most 2 nodes are to train, in place of 4"
    assert incident["failures"] == []
    assert len(job.given_back) == 2
    job.order_size(4)
    job.run_until(lambda: len(closed(job)) == 2)
    grown = closed(job)[1]
    assert grown["decision"] == "grow to a larger mesh"
    assert grown["evidence"][0].endswith("in place of 2 ranks, as ordered")
    assert not job.given_back
    assert job.run().outcome == "SUCCEEDED"
    assert world_sizes(job) == [4, 2, 4]
    phases = [event["phase"] for event in job.emitted(EventKind.PHASE)]
    assert phases.count("RESIZING") == 2
    assert "RECOVERING" not in phases


def test_an_ordered_size_holds_under_faults_and_for_later_supervisors() -> None:
    job = running(elastic(steps=2000))
    job.order_size(3)
    job.run_until(lambda: bool(job.given_back))
    job.restart_supervisor()
    running(job, job.core.committed + 50)
    lost = sorted(agent.name for agent in job.agents.values() if agent.alive)[0]
    job.kill_node(lost, back_after_s=10.0)
    assert job.run().outcome == "SUCCEEDED"
    assert world_sizes(job) == [4, 3, 2, 3]


def test_a_job_takes_no_more_nodes_while_others_wait_for_them() -> None:
    job = running(elastic(steps=2000))
    job.order_size(None, is_held=True)
    job.kill_node("n3", back_after_s=1.0)
    job.run_until(lambda: len(closed(job)) == 1)
    running(job, job.core.committed + 300)
    assert world_sizes(job) == [4, 3]
    job.order_size(None)
    assert job.run().outcome == "SUCCEEDED"
    assert world_sizes(job) == [4, 3, 4]


def test_a_start_takes_the_ordered_size() -> None:
    job = elastic()
    job.order_size(2)
    assert job.run().outcome == "SUCCEEDED"
    assert world_sizes(job) == [2]


def lose(job: SimulatedCluster, *names: str) -> None:
    for name in names:
        job.kill_node(name, back_after_s=None)


def test_a_job_with_too_few_nodes_saves_its_newest_state_and_is_given_back() -> None:
    job = running(elastic(on_shortage="queue", wait_for_replacement_s=5.0))
    lose(job, "n3")
    job.run_until(lambda: len(closed(job)) == 1)
    running(job, job.core.committed + 20)  # every rank has a copy on another node
    lose(job, "n2")
    job.run_until(lambda: len(closed(job)) == 2)
    running(job, job.core.committed + 20)
    lose(job, "n1")
    reached = job.core.committed
    end = job.run()
    assert (end.outcome, end.code) == ("PAUSED", "no_nodes")
    (ended,) = job.emitted(EventKind.ENDED)
    assert ended["durable_step"] >= reached - 1
    assert "no node for rank 1 within 5 s" in ended["message"]


def test_a_job_that_is_to_fail_for_lack_of_nodes_fails() -> None:
    job = running(elastic(wait_for_replacement_s=5.0))
    lose(job, "n1", "n2", "n3")
    end = job.run()
    assert (end.outcome, end.code) == ("FAILED", "no_replacement")


def test_a_node_that_comes_back_during_the_save_keeps_the_job() -> None:
    job = running(elastic(on_shortage="queue", wait_for_replacement_s=5.0, requeue_save_s=30.0))
    job.publishes = False
    lose(job, "n2", "n3")
    job.run_until(lambda: len(closed(job)) == 1)
    running(job, job.core.committed + 20)
    job.kill_node("n1", back_after_s=12.0)
    job.run_until(lambda: bool(job.emitted(EventKind.WAITING)))
    job.run_until(lambda: job.core.stage is Stage.RUNNING, 60.0)
    job.publishes = True
    assert job.run().outcome == "SUCCEEDED"


def test_scheduled_meshes_hold_for_exactly_their_steps_whatever_fails() -> None:
    schedule = ((0, SHAPES[0]), (40, SHAPES[2]), (90, SHAPES[1]))
    job = running(elastic(schedule=schedule, steps=140))
    for after_s in (2.0, 5.0, 7.0):
        job.at(after_s, lambda: job.kill_worker("n1"))
    assert job.run().outcome == "SUCCEEDED"
    sizes = {event["attempt"]: event["world_size"] for event in forming(job)}
    computed = {step: sizes[attempt] for attempt, step in job.committed}
    expected = {s: 4 if s <= 40 else 2 if s <= 90 else 3 for s in range(1, 141)}
    assert computed == expected


def test_a_planned_change_prepares_its_ranks_and_gives_up_no_step() -> None:
    job = running(elastic())
    job.order_size(2)
    job.run_until(lambda: world_sizes(job) == [4, 2])
    job.run_until(lambda: len(closed(job)) == 1)
    (incident,) = closed(job)
    assert incident["steps_lost"] == 0
    by_rank = members(forming(job)[-1])
    assert {job.agents[agent].prepared[worker] for agent, worker in by_rank.values()} == {0, 1}
    assert set(incident["tiers"].values()) == {"reshard"}


def test_ranks_that_do_not_leave_in_time_are_fenced() -> None:
    job = running(elastic(leave_s=3.0))
    for agent in job.agents.values():
        agent.refused.add(CommandKind.LEAVE)
    job.order_size(2)
    job.run_until(lambda: world_sizes(job) == [4, 2])
    assert job.run().outcome == "SUCCEEDED"


def test_a_restarted_supervisor_gives_no_seat_back_before_it_knows_the_ranks() -> None:
    job = running(elastic(steps=2000))
    job.cut_off("n2", for_s=3.0)
    job.restart_supervisor()
    job.order_size(None, is_held=True)
    job.run_until(lambda: job.core.stage is Stage.RUNNING)
    assert not job.given_back
    assert job.run().outcome == "SUCCEEDED"


def test_a_world_meets_at_the_store_of_a_standby_if_its_own_nodes_have_none() -> None:
    job = running(elastic(schedule=((0, SHAPES[0]), (30, SHAPES[2]))))
    for name in ("n0", "n1"):
        job.lose_store(name, 600.0)
    job.run_until(lambda: world_sizes(job) == [4, 2])
    hosts = {agent for agent, _ in members(forming(job)[-1]).values()}
    assert hosts == {"n0", "n1"}
    assert job.run().outcome == "SUCCEEDED"


def test_a_fault_of_a_rank_that_the_present_mesh_lacks_has_failed_and_hurts_nothing() -> None:
    job = running(elastic())
    job.order_size(2)
    job.run_until(lambda: world_sizes(job) == [4, 2])
    job.feed(FaultRequested(1, Injection.of({"kind": "kill", "rank": 3})))
    (failed,) = job.emitted(EventKind.FAULT_FAILED)
    assert failed["why"] == "the present mesh, dp_shard 2, has no rank 3"
    assert job.run().outcome == "SUCCEEDED"


def test_ranks_that_stay_beyond_their_scheduled_mesh_are_fenced_after_a_while() -> None:
    plan = ((0, SHAPES[0]), (20, SHAPES[2]))
    job = running(elastic(schedule=plan, leave_s=3.0))
    job.leaves = False
    job.run_until(lambda: world_sizes(job) == [4, 2])
    assert 20 + 30 <= job.core.committed <= 20 + 40
    job.run_until(lambda: len(closed(job)) == 1)
    assert closed(job)[0]["evidence"] == ["the ranks did not leave after step 20, as scheduled"]
    assert job.run().outcome == "SUCCEEDED"


def test_a_world_does_not_leave_for_a_mesh_that_it_would_not_take() -> None:
    job = running(elastic(grow_min_gain=-0.1, steps=1500))
    job.kill_node("n3", back_after_s=1.0)
    assert job.run().outcome == "SUCCEEDED"
    formed = [(event["mesh"], event["attempt"]) for event in forming(job)]
    assert len(formed) > 1
    assert all(before[0] != after[0] for before, after in pairwise(formed)), formed
