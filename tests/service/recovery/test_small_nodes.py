"""Nodes that are too small for a job, or lack software: the job is given back, or uses others, with
the reason."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.support.simulation.core_states import running_state
from tests.support.simulation.simulated_cluster import SimulatedCluster
from tests.support.simulation.simulated_jobs import cluster, forming, members, running

from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_service.recovery.core_state.inputs import AgentUp
from holdfast_workers.protocol.findings import HealthFinding, Level
from holdfast_workers.protocol.messages import Restore, Tier
from holdfast_workers.spec import ModelSpec, PublishedSpec

SMALL = HealthFinding("room", "shm", Level.UNFIT, "it has 1 MB, needs 3 MB", needed=3, there=1)

LACKING = HealthFinding("software", "holdfast", Level.UNFIT, "10.0.0.2: no Holdfast", lost=True)


def without_software(job: SimulatedCluster, agent: str) -> SimulatedCluster:
    job.agents[agent].never_ready = True
    job.at(0.1, lambda: job.fall_ill(agent, for_s=10_000.0, finding=LACKING))
    return job


def with_a_small_node(job: SimulatedCluster, agent: str) -> SimulatedCluster:
    job.agents[agent].health, job.agents[agent].findings = 1, (SMALL,)
    return job


Spoil = Callable[[SimulatedCluster, str], SimulatedCluster]
UNUSABLE = pytest.mark.parametrize(
    ("spoil", "finding", "how", "why"),
    [
        (with_a_small_node, SMALL, "is too small", SMALL.what),
        (without_software, LACKING, "cannot be used", LACKING.what),
    ],
)


@UNUSABLE
def test_a_job_with_a_standby_starts_beside_an_unusable_node(
    spoil: Spoil, finding: HealthFinding, how: str, why: str
) -> None:
    job = spoil(cluster(standbys=1), "n1")
    assert job.run().outcome == "SUCCEEDED"
    assert {agent for agent, _ in members(forming(job)[0]).values()} == {"n0", "n2"}


@UNUSABLE
def test_a_job_without_a_standby_is_given_back_as_soon_as_all_nodes_have_come(
    spoil: Spoil, finding: HealthFinding, how: str, why: str
) -> None:
    job = spoil(cluster(standbys=0, on_shortage="queue", start_s=900.0), "n1")
    began = job.now
    end = job.run()
    assert (end.outcome, end.code) == ("PAUSED", "no_nodes")
    assert f"1 of 2 nodes can be used; n1 {how}: {why}" in end.message
    assert job.now - began < 60.0


@UNUSABLE
def test_a_job_that_is_not_to_be_queued_again_fails_and_names_the_node(
    spoil: Spoil, finding: HealthFinding, how: str, why: str
) -> None:
    job = spoil(cluster(standbys=0, start_s=9.0), "n1")
    end = job.run()
    assert (end.outcome, end.code) == ("FAILED", "start_timeout")
    assert f"n1 is not used: {why}" in end.message


@UNUSABLE
def test_an_unusable_replacement_gets_no_rank_and_is_named_when_the_wait_is_over(
    spoil: Spoil, finding: HealthFinding, how: str, why: str
) -> None:
    job = running(cluster(standbys=1, on_shortage="queue", wait_for_replacement_s=5.0))
    job.kill_node("n2", back_after_s=None)
    job.kill_node("n1", back_after_s=2.0)
    job.at(2.5, lambda: job.fall_ill("n1", for_s=600.0, finding=finding))
    end = job.run()
    assert (end.outcome, end.code) == ("PAUSED", "no_nodes")
    assert f"n1 {how}: {why}" in end.message
    assert len(job.emitted(EventKind.ATTEMPT_FORMING)) == 1


def test_a_node_without_software_that_appears_later_is_no_standby() -> None:
    job = running(cluster(standbys=1))
    (spare,) = {"n0", "n1", "n2"} - {agent for agent, _ in members(forming(job)[0]).values()}
    agent = job.agents[spare]
    agent.never_ready, agent.health, agent.findings = True, 1, (LACKING,)
    agent.life += 1
    before = len(job.emitted(EventKind.STANDBY))
    job.send(AgentUp(agent.report()))
    job.run()
    assert [event["state"] for event in job.emitted(EventKind.STANDBY)[before:]] == []


PUBLISHED = PublishedSpec(
    uri="/store/weights/0", digest="0" * 32, manifest_bytes=1, nbytes=1, positions=8
)


@pytest.mark.parametrize(
    ("restore", "published", "expected"),
    [
        (Restore(Tier.REMOTE, 9, uri="s3://bucket/9"), None, 70.0),
        (Restore(Tier.INIT, 0, uri="s3://bucket/other"), None, 70.0),
        (Restore(Tier.INIT, 0), None, 20.0),
        (Restore(Tier.INIT, 0), PUBLISHED, 70.0),
        (Restore(Tier.PARTNER_RAM, 9), PUBLISHED, 20.0),
    ],
)
def test_ranks_that_load_from_the_remote_tier_get_the_time_for_it(
    restore: Restore, published: PublishedSpec | None, expected: float
) -> None:
    model = ModelSpec.model_validate({"from": "/models/tiny", "published": published})
    restores = dict.fromkeys(range(4), restore)
    state = running_state(restores=restores, form_s=20.0, load_s=50.0, model=model)
    world = state.worlds.present
    assert world is not None
    assert world.forming_s(state.config) == expected
