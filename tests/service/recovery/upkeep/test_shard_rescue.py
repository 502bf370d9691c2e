"""Completion of remote saves whose savers die or fail, on the simulated cluster."""

from __future__ import annotations

from dataclasses import replace

from tests.support.simulation.simulated_cluster import SimulatedCluster
from tests.support.simulation.simulated_jobs import closed, cluster, running

from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_service.recovery.core_state import inputs
from holdfast_service.recovery.core_state.stage_timer import Stage
from holdfast_workers.protocol.messages import Place


def saving_at_ten(standbys: int = 1) -> SimulatedCluster:
    """Step 10 is being saved to the remote tier, and is already in the memory of two nodes."""
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


def saved(job: SimulatedCluster) -> list[tuple[int, int]]:
    return [(event["attempt"], event["step"]) for event in job.emitted(EventKind.CHECKPOINT_SAVED)]


def test_another_agent_finalizes_the_last_checkpoint_if_the_first_dies() -> None:
    job = cluster()
    job.run_until(lambda: bool(job.core.state.saves.pending.values()) and job.core.committed == 30)
    (pending,) = job.core.state.saves.pending.values()
    assert pending.agent is not None
    job.kill_agent(pending.agent)
    assert job.run().outcome == "SUCCEEDED"


def test_a_new_attempt_saves_a_failed_shard_of_the_last_step() -> None:
    job = cluster()
    job.run_until(lambda: job.core.committed >= 25)
    job.shard_failures = 1
    assert job.run().outcome == "SUCCEEDED"
    assert closed(job)[-1]["cause"] == "checkpoint_failed"


def test_without_the_last_checkpoint_the_job_has_not_succeeded() -> None:
    job = cluster(finish_s=3.0)
    job.run_until(lambda: job.core.committed >= 25)
    job.publishes = False
    end = job.run()
    assert (end.outcome, end.code) == ("FAILED", "final_checkpoint")


def test_the_reason_of_a_remote_outage_is_in_the_wait_and_in_the_end_of_the_job() -> None:
    job = cluster()
    silent = inputs.RemoteCheckpoints((), known=False, problem="it was silent for 10 s")
    job.feed(silent)
    job.run_until(lambda: job.core.stage is Stage.WAITING)
    denied = replace(silent, problem="s3://bucket: access denied")
    job.feed(denied)
    job.feed(denied)
    resources = [data["resource"] for data in job.emitted(EventKind.WAITING)]
    assert ["silent" in resources[0], "denied" in resources[1], len(resources)] == [True, True, 2]
    end = job.run()
    assert end.code == "no_replacement"
    assert "s3://bucket: access denied" in end.message


def test_partners_complete_a_remote_save_when_a_node_dies() -> None:
    job = saving_at_ten()
    job.kill_node("n0")
    assert job.run().outcome == "SUCCEEDED"
    assert {(save.rank, save.place) for save in job.completions} == {
        (0, Place.REPLICA),
        (1, Place.REPLICA),
    }
    assert (1, 10) in saved(job)


def test_a_remote_save_is_completed_while_the_job_waits_and_requested_once() -> None:
    job = saving_at_ten(standbys=0)
    job.kill_node("n0", back_after_s=20.0)
    job.run_until(lambda: (1, 10) in saved(job))
    assert job.core.stage is Stage.WAITING
    assert job.run().outcome == "SUCCEEDED"
    assert sorted(save.rank for save in job.completions) == [0, 1]


def test_no_shard_is_requested_if_the_checkpoint_cannot_be_completed() -> None:
    job = saving_at_ten()
    for agent in job.agents.values():
        agent.memory.pop((Place.REPLICA, 1), None)
    job.kill_node("n0")
    assert job.run().outcome == "SUCCEEDED"
    assert not job.completions
    assert (1, 10) not in saved(job)


def test_a_save_that_continues_on_its_own_node_is_not_requested_elsewhere() -> None:
    job = saving_at_ten()
    job.kill_rank(1)
    assert job.run().outcome == "SUCCEEDED"
    assert not job.completions
    assert (1, 10) in saved(job)
