"""Holdfast is upgraded while a job runs: no world mixes processes of two builds."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.service.recovery.test_elastic_worlds import elastic, world_sizes
from tests.service.recovery.test_recovery_histories import FAULTS, LAYOUTS, prepared
from tests.support.simulation.simulated_cluster import SimulatedCluster
from tests.support.simulation.simulated_jobs import closed, cluster, forming, running

from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_service.placement.restore_points import RemoteCheckpoint


def upgraded(job: SimulatedCluster) -> SimulatedCluster:
    upgrade(job)
    return job


def upgrade(job: SimulatedCluster) -> None:
    job.installed_build = "new"


def builds_of_worlds(job: SimulatedCluster) -> list[set[str]]:
    """Of each world, the builds of the agents of its ranks."""
    return [
        {job.builds[member["agent"], member["incarnation"]] for member in event["members"]}
        for event in forming(job)
    ]


def test_processes_of_the_former_build_go_on_as_before() -> None:
    job = upgraded(running(cluster(standbys=0, steps=60)))
    job.kill_rank(1)
    job.run_until(lambda: len(closed(job)) == 1)
    job.restart_supervisor()
    running(job, job.core.committed + 5)
    assert (job.core.build, job.config.build) == ("", "")
    job.kill_rank(0)
    assert job.run().outcome == "SUCCEEDED"
    assert builds_of_worlds(job) == [{""}] * 3


def test_a_standby_of_the_former_build_takes_the_ranks_of_an_agent_that_starts_again() -> None:
    job = upgraded(running(cluster(standbys=1, steps=60)))
    job.kill_agent("n1", back_after_s=0.5)
    assert job.run().outcome == "SUCCEEDED"
    assert builds_of_worlds(job) == [{""}] * 2
    assert job.builds["n1", "i2"] == "new"


def test_a_job_whose_agent_starts_again_in_another_build_is_saved_and_queued_at_once() -> None:
    job = upgraded(running(cluster(standbys=0, steps=60, wait_for_replacement_s=500.0)))
    job.kill_agent("n1", back_after_s=1.0)
    reached, began = job.core.committed, job.now
    end = job.run()
    assert (end.outcome, end.code) == ("PAUSED", "no_nodes")
    assert builds_of_worlds(job) == [{""}]
    (ended,) = job.emitted(EventKind.ENDED)
    assert ended["durable_step"] >= reached - 1
    assert "Holdfast was upgraded: n1 and the job's other nodes run" in ended["message"]
    assert job.now - began < 30.0


def test_a_job_whose_state_cannot_be_saved_is_queued_all_the_same() -> None:
    job = upgraded(running(cluster(standbys=0, steps=60, requeue_save_s=5.0)))
    job.publishes = False
    job.kill_agent("n1", back_after_s=1.0)
    end = job.run()
    assert (end.outcome, end.code) == ("PAUSED", "no_nodes")
    assert "Holdfast was upgraded" in job.emitted(EventKind.ENDED)[0]["message"]


def test_a_start_on_nodes_of_two_builds_fails_and_names_the_node() -> None:
    job = cluster(standbys=0, start_s=20.0)
    job.agents["n1"].build = "other"
    end = job.run()
    assert (end.outcome, end.code) == ("FAILED", "start_timeout")
    assert "n1 runs another build of Holdfast" in job.emitted(EventKind.ENDED)[0]["message"]


def test_a_job_all_of_whose_agents_start_again_goes_on_in_the_other_build() -> None:
    job = upgraded(running(cluster(standbys=0, steps=60)))
    for name in ("n0", "n1"):
        job.kill_agent(name, back_after_s=1.0)
    assert job.run().outcome == "SUCCEEDED"
    assert builds_of_worlds(job) == [{""}, {"new"}]
    assert job.core.build == "new"


def test_a_smaller_world_that_was_ordered_is_formed_beside_a_standby_of_another_build() -> None:
    job = upgraded(running(elastic(standbys=1, steps=600)))
    job.kill_agent("n3", back_after_s=0.5)
    job.run_until(lambda: len(closed(job)) == 1 and job.builds["n3", "i2"] == "new")
    running(job, job.core.committed + 20)
    job.order_size(2)
    assert job.run().outcome == "SUCCEEDED"
    assert world_sizes(job) == [4, 4, 2]


def test_a_job_that_has_trained_is_queued_again_until_all_nodes_have_one_build() -> None:
    saved = (RemoteCheckpoint(step=20, attempt=1, uri="uri"),)
    job = cluster(standbys=0, start_s=20.0, remotes=saved)
    job.agents["n1"].build = "other"
    end = job.run()
    assert (end.outcome, end.code) == ("PAUSED", "no_nodes")
    assert "n1 runs another build of Holdfast" in job.emitted(EventKind.ENDED)[0]["message"]


@pytest.mark.seconds
@given(
    layout=st.integers(0, len(LAYOUTS) - 1),
    faults=FAULTS,
    chaos=st.sampled_from((0.0, 0.05, 0.3)),
    seed=st.integers(0, 2**16),
    at_s=st.floats(0.0, 10.0),
)
@settings(max_examples=80, suppress_health_check=[HealthCheck.too_slow])
def test_no_world_mixes_builds_whatever_fails(
    layout: int, faults: list[tuple[float, str, int, int]], chaos: float, seed: int, at_s: float
) -> None:
    job = prepared(layout, faults, chaos, seed)
    job.at(at_s, partial(upgrade, job))
    end = job.run()
    ends = [("SUCCEEDED", "succeeded"), ("PAUSED", "no_nodes")]
    if not forming(job):  # upgraded during its start
        ends += [("FAILED", "start_timeout"), ("FAILED", "no_replacement")]
    assert (end.outcome, end.code) in ends, end
    assert all(len(builds) == 1 for builds in builds_of_worlds(job))
