"""An elastic job grows only where the larger mesh is expected to be worth the pause."""

from __future__ import annotations

from functools import partial
from math import log2
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.simulation.simulated_cluster import SimulatedCluster
from tests.support.simulation.simulated_jobs import closed, cluster, forming, running

from holdfast_service.job_model.resources_spec import ResourcesSpec
from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_service.placement.world_shape import WorldShape

SHAPES = tuple(WorldShape.of({"dp_shard": ranks}, 1) for ranks in (4, 3, 2))
GROW_AFTER_S = 2.0


def elastic(speeds: dict[int, float], **changes: Any) -> SimulatedCluster:
    options: dict[str, Any] = {
        "standbys": 0,
        "shapes": SHAPES,
        "steps": 600,
        "grow_after_s": GROW_AFTER_S,
        "grow_min_gain": 0.05,
        "micro_batches": 12,
    }
    job = cluster(**(options | changes))
    job.speeds = speeds
    return job


def world_sizes(job: SimulatedCluster) -> list[int]:
    return [event["world_size"] for event in forming(job)]


def lose_and_return(job: SimulatedCluster, node: str = "n3", back_after_s: float = 5.0) -> None:
    running(job, step=20)
    job.kill_node(node, back_after_s=back_after_s)


def test_it_grows_to_a_mesh_that_was_measured_to_be_faster_and_the_incident_says_so() -> None:
    job = elastic({4: 400.0, 3: 300.0, 2: 200.0})
    lose_and_return(job)
    assert job.run().outcome == "SUCCEEDED"
    assert world_sizes(job) == [4, 3, 4]
    assert (
        "3 ranks (dp_shard 3) on 3 nodes in place of 4 (dp_shard 4) on 4: "
        "modelled 300 tokens/s, not measured"
    ) in closed(job)[0]["reason"]
    reason = closed(job)[1]["evidence"][0]
    assert "+33% expected (measured 400 tokens/s; now measured 300 tokens/s)" in reason


def test_it_does_not_grow_to_a_mesh_that_was_measured_to_be_slower() -> None:
    job = elastic({4: 250.0, 3: 300.0, 2: 200.0})
    lose_and_return(job)
    assert job.run().outcome == "SUCCEEDED"
    assert world_sizes(job) == [4, 3]


def test_a_fault_on_the_smaller_mesh_does_not_bring_the_slower_larger_one_back() -> None:
    job = elastic({4: 250.0, 3: 300.0, 2: 200.0})
    lose_and_return(job)
    job.run_until(lambda: world_sizes(job)[-1] == 3 and job.core.committed > 100)
    job.kill_rank(0)
    assert job.run().outcome == "SUCCEEDED"
    assert world_sizes(job) == [4, 3, 3]


def test_a_supervisor_that_restarts_remembers_what_was_measured() -> None:
    job = elastic({4: 250.0, 3: 300.0, 2: 200.0})
    lose_and_return(job, back_after_s=12.0)
    job.run_until(lambda: world_sizes(job)[-1] == 3 and job.core.committed > 60)
    job.restart_supervisor()
    assert job.run().outcome == "SUCCEEDED"
    assert world_sizes(job) == [4, 3]


def test_a_mesh_with_as_many_passes_is_not_worth_a_pause() -> None:
    job = elastic({}, micro_batches=6)  # three ranks and four ranks need two passes each
    lose_and_return(job)
    assert job.run().outcome == "SUCCEEDED"
    assert world_sizes(job) == [4, 3]


def test_near_its_end_a_job_does_not_grow() -> None:
    job = elastic({4: 40_000.0, 3: 30_000.0, 2: 20_000.0}, steps=200)
    running(job, step=150)
    job.kill_node("n3", back_after_s=0.5)
    assert job.run().outcome == "SUCCEEDED"
    assert world_sizes(job) == [4, 3]


def test_an_order_of_the_user_and_a_gain_of_minus_one_ignore_throughput() -> None:
    slow = {4: 250.0, 3: 300.0, 2: 200.0}
    ordered = elastic(slow)
    lose_and_return(ordered)
    ordered.run_until(lambda: world_sizes(ordered)[-1] == 3 and ordered.core.committed > 60)
    ordered.order_size(2)
    ordered.run_until(lambda: world_sizes(ordered)[-1] == 2)
    ordered.order_size(None)
    assert ordered.run().outcome == "SUCCEEDED"
    assert world_sizes(ordered) == [4, 3, 2, 4]
    always = elastic(slow, grow_min_gain=-1.0)
    lose_and_return(always)
    assert always.run().outcome == "SUCCEEDED"
    assert world_sizes(always) == [4, 3, 4]


def test_a_list_of_meshes_is_their_order() -> None:
    listed = {"min": 2, "max": 4, "preferred": [{"dp_shard": ranks} for ranks in (4, 3, 2)]}
    resources = ResourcesSpec.model_validate({"nodes": listed})
    job = elastic({4: 250.0, 3: 300.0, 2: 200.0}, resources=resources)
    lose_and_return(job)
    assert job.run().outcome == "SUCCEEDED"
    assert world_sizes(job) == [4, 3, 4]


@pytest.mark.slow
@given(
    speeds=st.tuples(*(st.floats(100.0, 1000.0) for _ in SHAPES)),
    losses=st.lists(
        st.tuples(st.floats(0.5, 60.0), st.sampled_from(("n1", "n2", "n3")), st.floats(0.5, 20.0)),
        max_size=8,
    ),
    drift=st.lists(
        st.tuples(st.floats(0.5, 60.0), st.sampled_from((4, 3, 2)), st.floats(100.0, 1000.0)),
        max_size=6,
    ),
    gain=st.sampled_from((-1.0, 0.0, 0.05, 0.3)),
    micro_batches=st.sampled_from((0, 4, 6, 12)),
)
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
def test_it_never_oscillates_however_nodes_and_speeds_change(
    speeds: tuple[float, ...],
    losses: list[tuple[float, str, float]],
    drift: list[tuple[float, int, float]],
    gain: float,
    micro_batches: int,
) -> None:
    now = dict(zip((4, 3, 2), speeds, strict=True))
    job = elastic(now, grow_min_gain=gain, micro_batches=micro_batches, max_failures=1000)
    for at, node, back_after_s in losses:
        job.at(at, partial(job.kill_node, node, back_after_s=back_after_s))
    for at, ranks, speed in drift:
        job.at(at, partial(now.__setitem__, ranks, speed))
    assert job.run().outcome == "SUCCEEDED"
    grown = [incident for incident in closed(job) if incident["cause"] == "resize"]
    lasted_s = max(1.0, job.now - job.step_times[0][2])
    assert len(grown) <= 2 + log2(1 + lasted_s / GROW_AFTER_S), world_sizes(job)
    assert len(world_sizes(job)) <= 1 + len(job.emitted(EventKind.INCIDENT_OPENED)) * 3
    if gain >= 0:
        assert all("expected (" in " ".join(incident["evidence"]) for incident in grown)
