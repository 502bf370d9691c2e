"""A slow rank on the simulated cluster: reported, and moved if a better node is available."""

from __future__ import annotations

from tests.support.simulation.simulated_cluster import SimulatedCluster
from tests.support.simulation.simulated_jobs import closed, cluster, forming, members, running

from holdfast_service.job_model.supervisor_protocol import EventKind


def straggler_events(job: SimulatedCluster) -> list[tuple[str, int]]:
    return [(event["state"], event["rank"]) for event in job.emitted(EventKind.STRAGGLER)]


def test_ranks_leave_a_lastingly_slow_node_for_the_standby() -> None:
    job = cluster(steps=200, straggler_patience_s=3.0, workers_per_node=1, standbys=1)
    job.slow_nodes = {"n2-1": 1.0}
    running(job)
    job.slow_nodes = {"n2-1": 3.0}
    began = job.core.committed
    assert job.run().outcome == "SUCCEEDED"
    slow, moved = job.emitted(EventKind.STRAGGLER)
    assert (slow["state"], slow["rank"], slow["agent"], slow["node_id"]) == (
        "slow",
        2,
        "n2",
        "n2-1",
    )
    assert slow["factor"] == 3.0
    assert abs(slow["since_step"] - began) <= 2
    assert slow["step"] <= began + 10
    assert moved["state"] == "moved"
    (incident,) = closed(job)
    assert incident["cause"] == "straggler"
    assert incident["decision"] == "replace the node"
    assert incident["steps_lost"] <= 1
    assert members(forming(job)[-1])[2][0] == "n4"
    assert len(forming(job)) == 2


def test_a_spec_may_keep_ranks_on_a_slow_node() -> None:
    job = running(cluster(steps=200, straggler_patience_s=3.0, replace_stragglers=False))
    job.slow_nodes = {"n1-1": 3.0}
    assert job.run().outcome == "SUCCEEDED"
    assert sorted(straggler_events(job)) == [("slow", 2), ("slow", 3)]
    assert len(forming(job)) == 1 and not job.emitted(EventKind.INCIDENT_OPENED)


def test_a_rank_that_recovers_in_time_stays_on_its_node() -> None:
    job = running(cluster(steps=200, straggler_patience_s=8.0))
    job.slow_nodes = {"n0-1": 2.0, "n1-1": 1.0}
    job.at(3.0, lambda: setattr(job, "slow_nodes", {"n1-1": 1.0}))
    assert job.run().outcome == "SUCCEEDED"
    assert sorted(straggler_events(job)) == [
        ("recovered", 0),
        ("recovered", 1),
        ("slow", 0),
        ("slow", 1),
    ]
    assert len(forming(job)) == 1


def test_a_restarted_supervisor_knows_slow_ranks_and_reports_recovered_ranks() -> None:
    job = running(cluster(steps=200, standbys=0, straggler_patience_s=1000.0))
    job.slow_nodes = {"n1-1": 3.0}
    job.run_until(lambda: len(straggler_events(job)) == 2)
    job.restart_supervisor()
    job.run_until(lambda: job.core.committed > 100)
    assert len(straggler_events(job)) == 2, "reported once"
    job.slow_nodes = {"n1-1": 1.0}
    assert job.run().outcome == "SUCCEEDED"
    assert sorted(straggler_events(job)) == [
        ("recovered", 2),
        ("recovered", 3),
        ("slow", 2),
        ("slow", 3),
    ]


def test_a_slow_rank_that_moved_during_a_supervisor_restart_is_no_longer_slow() -> None:
    job = cluster(steps=200, standbys=1, workers_per_node=1, straggler_patience_s=1000.0)
    running(job)
    job.slow_nodes = {"n2-1": 3.0, "n0-1": 1.0}
    job.run_until(lambda: len(straggler_events(job)) == 1)
    job.kill_node("n2", None)
    job.restart_supervisor()
    assert job.run().outcome == "SUCCEEDED"
    assert straggler_events(job) == [("slow", 2), ("moved", 2)]
