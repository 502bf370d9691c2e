"""Outages of a job's data on the simulated cluster: ranks wait for the manifest of a token set, and
each attempt ends when their patience does."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.simulation.simulated_cluster import SimulatedCluster
from tests.support.simulation.simulated_jobs import closed, cluster, forming, running

from holdfast_service.job_model.events.incidents import IncidentRecord
from holdfast_service.policy.decision_ladder import DATA_OUTAGE_S
from holdfast_service.recovery.core_state.event_replay import Facts
from holdfast_workers.protocol.codec import restore

HOUR_S = 3600.0
PATIENCE_S = 100.0
"""Of a rank, for a manifest; less than the 120 s in which ranks must join."""
STANDBY = "n2"


def impatient(job: SimulatedCluster) -> SimulatedCluster:
    job.data_patience_s = PATIENCE_S
    return job


def without_data_from_the_start(for_s: float, **limits: Any) -> SimulatedCluster:
    job = impatient(cluster(**limits))
    job.lose_data(*job.agents, for_s=for_s)
    return job


def without_data_after_a_lost_node(for_s: float, **limits: Any) -> SimulatedCluster:
    """The standby that takes the ranks of the node has nothing in its cache yet."""
    job = running(impatient(cluster(**limits)))
    job.lose_data(STANDBY, for_s=for_s)
    job.kill_node("n0", back_after_s=None)
    return job


STARTS = pytest.mark.parametrize(
    ("start", "other_failures"),
    [(without_data_from_the_start, 0), (without_data_after_a_lost_node, 1)],
)


@STARTS
@pytest.mark.parametrize("spare", [0, 20])
def test_an_outage_of_hours_uses_no_budget_of_other_failures(
    start: Any, other_failures: int, spare: int
) -> None:
    limits = {"max_failures": other_failures + spare, "max_without_progress": 0}
    job = start(for_s=2 * HOUR_S, **limits)
    assert job.run(3 * HOUR_S).outcome == "SUCCEEDED", job.ended
    (incident,) = closed(job)
    outages = incident["data_outages"]
    assert len(outages) == pytest.approx(2 * HOUR_S / PATIENCE_S, abs=5)
    assert len(incident["failures"]) == other_failures
    assert incident["budget"]["failures_left"] >= spare  # others may be out of the window
    assert len(job.core.state.budget.failures) == other_failures
    assert len(outages) + other_failures == len(forming(job)) - 1
    assert restore(IncidentRecord, incident).attempts_lost == len(outages) + other_failures
    assert_told_in_few_words(incident, other_failures)


def assert_told_in_few_words(incident: dict[str, Any], other_failures: int) -> None:
    """Each event of an incident has all of it: the journal would grow with the square."""
    assert len(incident["earlier"]) == other_failures + 1
    waits = incident["earlier"][-1]
    assert waits["cause"] == "data_unavailable"
    assert waits["attempt"] == other_failures + 1
    assert waits["next_attempt"] == other_failures + len(incident["data_outages"])
    waited = [each for each in incident["lost"] if each["cause"] == "data_unavailable"]
    assert len(waited) == len({each["rank"] for each in waited}) <= 4


@STARTS
def test_an_outage_that_lasts_longer_ends_the_job_with_its_own_reason(
    start: Any, other_failures: int
) -> None:
    job = start(for_s=2 * DATA_OUTAGE_S, max_failures=other_failures)
    end = job.run(2 * DATA_OUTAGE_S)
    assert (end.outcome, end.code) == ("FAILED", "data_unavailable")
    first, *_, last = closed(job)[0]["data_outages"]
    assert DATA_OUTAGE_S <= last - first < DATA_OUTAGE_S + 2 * PATIENCE_S
    assert "DataUnavailable: MANIFEST did not come" in end.message


def test_a_supervisor_that_ends_in_an_outage_begins_no_other_one() -> None:
    job = without_data_from_the_start(2 * DATA_OUTAGE_S, max_failures=1)
    job.run_until(lambda: len(forming(job)) > 100, DATA_OUTAGE_S)
    before = job.core.state.incidents.current
    assert before is not None
    job.restart_supervisor()
    after = job.core.state.incidents.current
    assert after is not None and after.data_outages == before.data_outages
    assert job.run(2 * DATA_OUTAGE_S).code == "data_unavailable"
    (incident,) = closed(job)
    first, *_, last = incident["data_outages"]
    assert DATA_OUTAGE_S <= last - first < DATA_OUTAGE_S + 3 * PATIENCE_S
    assert len(Facts.from_events(job.events).failures) == 1, "the attempt that it found stopped"


@given(
    outage_s=st.floats(0.0, 1.2 * DATA_OUTAGE_S),
    kills=st.lists(st.tuples(st.floats(0.0, HOUR_S), st.sampled_from(["n0", "n1"])), max_size=6),
    max_failures=st.integers(0, 3),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=15, deadline=None)
def test_only_other_failures_use_the_budget_whatever_else_fails_in_an_outage(
    outage_s: float, kills: list[tuple[float, str]], max_failures: int, seed: int
) -> None:
    job = impatient(cluster(max_failures=max_failures))
    job.random.seed(seed)
    job.lose_data(*job.agents, for_s=outage_s)
    for at, agent in kills:
        job.at(at, lambda agent=agent: job.kill_worker(agent))  # type: ignore[misc]
    end = job.run(2 * DATA_OUTAGE_S)
    failures = [at for incident in closed(job) for at in incident["failures"]]
    outages = [at for incident in closed(job) for at in incident["data_outages"]]
    assert len(failures) <= len(kills)
    match end.code:
        case "succeeded":
            assert len(failures) <= max_failures
            assert outage_s < DATA_OUTAGE_S + 3 * PATIENCE_S
        case "too_many_failures":
            assert len(failures) == max_failures + 1
        case _:
            assert end.code == "data_unavailable"
            assert max(outages) - min(outages) >= DATA_OUTAGE_S
