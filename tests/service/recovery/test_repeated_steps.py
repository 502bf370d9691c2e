"""A step that is computed again because two replicas differ; its outcome is reported once."""

from __future__ import annotations

from tests.support.simulation.simulated_cluster import SimulatedCluster
from tests.support.simulation.simulated_jobs import closed, cluster, forming, running

from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_service.recovery.core_state.stage_timer import Stage
from holdfast_workers.protocol.findings import ReplicaFinding
from holdfast_workers.protocol.messages import ErrorKind
from holdfast_workers.protocol.signals import StepRecomputed


def differ(job: SimulatedCluster, step: int) -> None:
    """Both replicas leave their attempt because their bits differ."""
    attempt = job.core.attempt
    finding = ReplicaFinding(attempt, step, step, groups=((0, 1),), digests={0: "a", 1: "b"})
    for _, agent, worker in job.members_of(attempt):
        assert worker is not None
        job.fail_worker(agent, worker, ErrorKind.CORRUPTION, "replicas differ", finding=finding)


def differed_twice() -> tuple[SimulatedCluster, int]:
    """A job in which another node recomputes a step, and that step."""
    mesh = {"dp_replicate": 2}
    job = running(cluster(mesh=mesh, workers_per_node=1, steps=200))
    step = job.core.committed
    for attempt in (2, 3):
        differ(job, step)
        job.run_until(lambda at=attempt: job.core.attempt == at)  # type: ignore[misc]
        job.run_until(lambda: job.core.stage is Stage.RUNNING and job.core.committed >= step)
    assert job.orders[3].recheck == step
    assert job.core.state.corruption.sidelined == {"n1"}
    return job, step


def agents(job: SimulatedCluster) -> list[str]:
    return [event["agent"] for event in forming(job)[-1]["members"]]


def test_a_lost_recheck_outcome_does_not_sideline_a_node_for_ever() -> None:
    job, _ = differed_twice()
    job.run_until(lambda: not job.core.state.corruption.sidelined)
    assert "was lost" in job.emitted(EventKind.INCIDENT_UPDATED)[-1]["evidence"][-1]
    job.kill_agent("n2", back_after_s=None)
    job.run_until(lambda: len(closed(job)) == 3)
    assert agents(job) == ["n0", "n1"]
    assert job.orders[4].recheck is None
    assert job.run().outcome == "SUCCEEDED"


def test_a_late_recheck_outcome_names_the_differing_rank() -> None:
    job, step = differed_twice()
    job.run_until(lambda: job.core.committed >= step + 10)
    job.signal(job.agents["n0"], StepRecomputed(step, ("a", "a")), 3, rank=0)
    job.run_until(lambda: not job.core.state.corruption.sidelined)
    job.run_until(lambda: len(closed(job)) == 3)
    lost = closed(job)[-1]["lost"]
    assert [fault["rank"] for fault in lost if fault["cause"] == "corruption"] == [1]
    assert job.run().outcome == "SUCCEEDED"


def test_a_recheck_outcome_received_before_all_ranks_joined_names_the_differing_rank() -> None:
    """Signals of other agents may be slower than that of the reporting rank."""
    mesh = {"dp_replicate": 2}
    job = running(cluster(mesh=mesh, workers_per_node=1, steps=200))
    step = job.core.committed
    differ(job, step)
    job.run_until(lambda: job.core.attempt == 2 and job.core.stage is Stage.FORMING)
    job.signal(job.agents["n0"], StepRecomputed(step, ("a", "a")), 2, rank=0)
    job.run_until(lambda: bool(closed(job)))
    lost = closed(job)[0]["lost"]
    assert [fault["rank"] for fault in lost if fault["cause"] == "corruption"] == [None, 1]
    assert job.run().outcome == "SUCCEEDED"
