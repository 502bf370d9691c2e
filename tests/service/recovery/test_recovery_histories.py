"""Long random histories of faults, with a network that delays, repeats and loses messages.

The watchdog checks every invariant after every input; these tests check the end of the job.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.support.simulation.core_config import core_config
from tests.support.simulation.simulated_cluster import SimulatedCluster
from tests.support.simulation.simulated_network import START

from holdfast_service.job_model.supervisor_protocol import EventKind, StopKind
from holdfast_service.placement.world_shape import WorldShape
from holdfast_service.policy.quarantine import NodeStanding
from holdfast_service.recovery.core_state import inputs

LAYOUTS: tuple[tuple[Sequence[Mapping[str, int]], int, int], ...] = (
    # meshes, workers per node, standby nodes
    ([{"dp_shard": 2, "tp": 2}], 2, 1),
    ([{"dp_shard": 2, "tp": 2}], 2, 0),
    ([{"dp_shard": 2, "tp": 2}], 1, 2),
    ([{"dp_shard": 3, "tp": 1}], 2, 1),
    ([{"dp_shard": 1, "tp": 1}], 1, 1),
    ([{"dp_shard": 4, "tp": 2}], 2, 2),
    ([{"dp_shard": 4, "tp": 1}, {"dp_shard": 2, "tp": 1}, {"dp_shard": 1, "tp": 1}], 1, 0),
    ([{"dp_shard": 4, "tp": 2}, {"dp_shard": 3, "tp": 2}, {"dp_shard": 2, "tp": 2}], 2, 1),
    ([{"dp_replicate": 2, "dp_shard": 2}, {"dp_shard": 3}, {"dp_shard": 2}], 2, 0),
)

OPS: dict[str, Callable[[SimulatedCluster, str, int], None]] = {
    "rank": lambda cluster, _, number: cluster.kill_rank(number),
    "worker": lambda cluster, agent, number: cluster.kill_worker(agent, number),
    "crash": lambda cluster, _, number: cluster.kill_rank(number, "SIGSEGV"),
    "agent": lambda cluster, agent, _: cluster.kill_agent(agent),
    "slow agent": lambda cluster, agent, _: cluster.kill_agent(agent, back_after_s=8.0),
    "node": lambda cluster, agent, _: cluster.kill_node(agent),
    "partition": lambda cluster, agent, number: cluster.cut_off(agent, for_s=1.0 + 2 * number),
    "reset": lambda cluster, agent, number: cluster.reset(agent, for_s=0.2 * number),
    "rot": lambda cluster, agent, _: cluster.make_copies_unreadable(agent),
    "unheard": lambda cluster, agent, number: cluster.lose_signals(agent, 1.0 + number),
    "stick": lambda cluster, agent, _: cluster.lose_next_worker(agent),
    "store": lambda cluster, agent, number: cluster.lose_store(agent, 0.5 + number),
    "link": lambda cluster, _, number: cluster.break_link(number),
    "shard": lambda cluster, _, number: setattr(cluster, "shard_failures", number % 3),
    "glitch": lambda cluster, _agent, _number: cluster.glitch(),
    "hang": lambda cluster, _, number: cluster.hang_rank(number % 4, "TRDS"[number % 4]),
    "slow": lambda cluster, _, number: cluster.slow_down(for_s=1.0 + number),
    "blind": lambda cluster, agent, _: cluster.stop_inspections_for(agent, 4.0),
    "drain": lambda cluster, agent, number: cluster.drain_node(agent, in_s=number),
    "cordon": lambda cluster, agent, number: cluster.set_aside(
        agent, 1.0 + number, NodeStanding.CORDONED
    ),
    "quarantine": lambda cluster, agent, number: cluster.set_aside(
        agent, 1.0 + number, NodeStanding.QUARANTINED
    ),
    "unwell": lambda cluster, agent, number: cluster.fall_ill(agent, 1.0 + number),
    "no data": lambda cluster, agent, number: cluster.lose_data(agent, for_s=1.0 + 3 * number),
    "unlinked": lambda cluster, agent, number: cluster.lose_link(agent, 1.0 + number),
    "size": lambda cluster, _, number: cluster.order_size(
        (None, 1, 2, 4)[number % 4], is_held=number > 3
    ),
    "supervisor": lambda cluster, _agent, _number: cluster.restart_supervisor(),
}

FAULTS = st.lists(
    st.tuples(
        st.floats(0.0, 15.0, allow_nan=False),
        st.sampled_from(sorted(OPS)),
        st.integers(0, 7),
        st.integers(0, 7),
    ),
    max_size=14,
)


def play(
    layout: int, faults: list[tuple[float, str, int, int]], chaos: float, seed: int, **limits: Any
) -> SimulatedCluster:
    cluster = prepared(layout, faults, chaos, seed, (), **limits)
    cluster.run()
    return cluster


def prepared(
    layout: int,
    faults: list[tuple[float, str, int, int]],
    chaos: float,
    seed: int,
    schedule: Sequence[tuple[int, int]] = (),
    **limits: Any,
) -> SimulatedCluster:
    """`schedule`: (step, index of the mesh of the steps after it)."""
    meshes, workers_per_node, standbys = LAYOUTS[layout]
    shapes = tuple(WorldShape.of(mesh, workers_per_node) for mesh in meshes)
    config = core_config(
        shapes,
        schedule=tuple((step, shapes[index]) for step, index in schedule),
        standby_nodes=standbys,
        steps=40,
        grow_after_s=0.5 + seed % 4,
        memory={"copies": 1 + seed % 2},
        function="users:function" if seed // 2 % 2 else None,
        free_after_s=1.0,
        **{
            "max_failures": 1000,
            "max_without_progress": 1000,
            "wait_for_replacement_s": 500.0,
            "start_s": 500.0,
            "form_s": 20.0,
            "first_step_s": 20.0,
            "finish_s": 300.0,
            "lease_s": 2.0,
            "lease_margin_s": 0.5,
            **limits,
        },
    )
    cluster = SimulatedCluster(config, seed, chaos=chaos, domains=seed % 3)
    cluster.data_patience_s = 2.0
    names = sorted(cluster.agents)
    for when, op, agent, number in faults:
        name = names[agent % len(names)]
        cluster.at(when, partial(OPS[op], cluster, name, number))
    return cluster


@pytest.mark.seconds
@given(
    layout=st.integers(0, len(LAYOUTS) - 1),
    faults=FAULTS,
    chaos=st.sampled_from((0.0, 0.05, 0.3)),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@example(
    layout=0,
    faults=[
        (0.0, "stick", 0, 0),
        (1.0, "unheard", 0, 7),
        (4.0, "agent", 1, 0),
        (8.0, "shard", 0, 1),
    ],
    chaos=0.0,
    seed=0,
)  # the failure of a shard of the last checkpoint was never received
@example(
    layout=0,
    faults=[(1.0, "unwell", 2, 7), (2.0, "node", 0, 0)],
    chaos=0.0,
    seed=0,
)  # the standby is healthy again while the job waits
@example(
    layout=1,
    faults=[(1.0, "cordon", 0, 7), (2.0, "agent", 0, 0)],
    chaos=0.0,
    seed=0,
)  # the cordon of a restarted host ends while the job waits
@example(
    layout=8,
    faults=[(1.0, "reset", 0, 3), (2.0, "agent", 1, 0)],
    chaos=0.0,
    seed=0,
)  # a process of the first mesh, whose agent answered after the next mesh had been announced
@example(
    layout=6,
    faults=[(3.0, "reset", 0, 3), (3.0, "size", 0, 4)],
    chaos=0.3,
    seed=0,
)  # a job that must not grow gave back the seat of an agent that was out of reach, with its copies
def test_the_job_succeeds_when_faults_stop_and_enough_agents_remain(
    layout: int, faults: list[tuple[float, str, int, int]], chaos: float, seed: int
) -> None:
    cluster = play(layout, faults, chaos, seed)
    assert cluster.ended is not None
    assert cluster.ended.outcome == "SUCCEEDED", cluster.ended
    assert cluster.committed[-1][1] == cluster.config.steps
    assert {step for _, step in cluster.committed} == set(range(1, cluster.config.steps + 1))
    for incident in cluster.emitted(EventKind.INCIDENT_CLOSED):
        phases_s = dict(incident["phases_s"])
        total_s = phases_s.pop("total")
        assert abs(sum(phases_s.values()) - total_s) < 1e-3, incident
        assert abs(incident["closed_at"] - incident["signalled_at"] - total_s) < 1e-3, incident


@given(
    layout=st.integers(0, len(LAYOUTS) - 1),
    faults=FAULTS,
    chaos=st.sampled_from((0.0, 0.05, 0.3)),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
def test_a_job_that_brings_a_program_succeeds_whatever_fails_meanwhile(
    layout: int, faults: list[tuple[float, str, int, int]], chaos: float, seed: int
) -> None:
    cluster = prepared(layout, faults, chaos, seed, command=("train",))
    assert cluster.run().code == "succeeded", cluster.ended


@pytest.mark.seconds
@given(
    layout=st.integers(6, len(LAYOUTS) - 1),
    faults=FAULTS,
    chaos=st.sampled_from((0.0, 0.05, 0.3)),
    seed=st.integers(0, 2**16),
    changes=st.dictionaries(st.integers(1, 39), st.integers(0, 2), max_size=4),
)
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@example(
    layout=8,
    faults=[(0.0, "cordon", 0, 0)],
    chaos=0.3,
    seed=7,
    changes={},
)  # the order that ended a cordon was overtaken by the order that began it
@example(
    layout=6,
    faults=[(0.0, "unwell", 0, 0), (0.0, "unheard", 0, 0)],
    chaos=0.0,
    seed=0,
    changes={},
)  # that a node was healthy again was never received
def test_each_step_is_computed_on_its_scheduled_mesh_whatever_fails(
    layout: int,
    faults: list[tuple[float, str, int, int]],
    chaos: float,
    seed: int,
    changes: dict[int, int],
) -> None:
    schedule = sorted({0: seed % 3, **changes}.items())
    cluster = prepared(layout, faults, chaos, seed, schedule)
    assert cluster.run().outcome == "SUCCEEDED", cluster.ended
    meshes = [dict(mesh) for mesh in LAYOUTS[layout][0]]
    used = {event["attempt"]: event["mesh"] for event in cluster.emitted(EventKind.ATTEMPT_FORMING)}
    computed = {step: used[attempt] for attempt, step in cluster.committed}
    for step in range(1, cluster.config.steps + 1):
        wanted = [index for after, index in schedule if after < step][-1]
        assert computed[step] == meshes[wanted], step


@given(
    layout=st.integers(0, len(LAYOUTS) - 1),
    faults=FAULTS,
    chaos=st.sampled_from((0.0, 0.05, 0.3)),
    seed=st.integers(0, 2**16),
    at=st.integers(1, 39),
    later=st.sampled_from((0, 1, 3, 100)),
    every=st.sampled_from((100, 1, 4)),
)
@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
def test_a_job_ends_at_the_step_after_which_its_ranks_decide_to_stop_early(
    layout: int,
    faults: list[tuple[float, str, int, int]],
    chaos: float,
    seed: int,
    at: int,
    later: int,
    every: int,
) -> None:
    """On a smaller mesh, results differ in their last bits, so the ranks may decide later, or never
    before the last step."""
    cluster = prepared(layout, faults, chaos, seed)
    sizes = [WorldShape.of(mesh, 1).world_size for mesh in LAYOUTS[layout][0]]
    cluster.early_at = {size: at + later * number for number, size in enumerate(sizes)}
    cluster.evaluation_s = dict.fromkeys(range(every, cluster.config.steps + 1, every), 1.5)
    end = cluster.run()
    assert (end.outcome, end.step) == ("SUCCEEDED", cluster.committed[-1][1]), end
    assert end.step in {checkpoint.step for checkpoint in cluster.remotes.values()}
    for incident in cluster.emitted(EventKind.INCIDENT_CLOSED):
        assert incident["signalled_at"] <= incident["closed_at"]
        taken_s = incident["closed_at"] - incident["signalled_at"]
        assert incident["phases_s"]["total"] == pytest.approx(taken_s, abs=1e-3)
    early = end.step != cluster.config.steps
    assert end.code == ("stopped_early" if early else "succeeded"), end
    if len(sizes) == 1:
        assert (end.step, early) == (at, True)
    if early:
        (*_, event) = cluster.emitted(EventKind.ENDS_EARLY)
        assert event["step"] == end.step
        assert event["reason"] in end.message


@given(
    layout=st.integers(0, len(LAYOUTS) - 1),
    faults=FAULTS,
    seed=st.integers(0, 2**16),
    max_failures=st.integers(0, 3),
    patience=st.sampled_from((0.5, 5.0, 30.0)),
)
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@example(
    layout=0,
    faults=[(2.0, "node", 0, 0), (2.5, "node", 1, 0)],
    seed=1,
    max_failures=3,
    patience=0.5,
)
def test_every_job_ends_with_a_named_reason_under_tight_limits(
    layout: int,
    faults: list[tuple[float, str, int, int]],
    seed: int,
    max_failures: int,
    patience: float,
) -> None:
    cluster = play(
        layout,
        faults,
        0.3,
        seed,
        max_failures=max_failures,
        wait_for_replacement_s=patience,
        start_s=30.0,
        finish_s=20.0,
    )
    assert cluster.ended is not None
    assert cluster.ended.code in (
        "succeeded",
        "too_many_failures",
        "no_replacement",
        "start_timeout",
        "final_checkpoint",
    )
    assert cluster.ended.message


@given(
    layout=st.integers(0, len(LAYOUTS) - 1),
    faults=FAULTS,
    chaos=st.sampled_from((0.0, 0.05, 0.3)),
    seed=st.integers(0, 2**16),
    kind=st.sampled_from(StopKind),
    asked_at=st.floats(0.0, 15.0),
    patience=st.sampled_from((0.5, 3.0, 60.0)),
)
@settings(max_examples=120, suppress_health_check=[HealthCheck.too_slow])
def test_a_stopping_job_ends_in_time_or_keeps_its_work(
    layout: int,
    faults: list[tuple[float, str, int, int]],
    chaos: float,
    seed: int,
    kind: StopKind,
    asked_at: float,
    patience: float,
) -> None:
    cluster = prepared(layout, faults, chaos, seed)
    deadline = START + asked_at + patience
    order = inputs.StopRequested(kind, "enough", deadline)
    cluster.at(asked_at, lambda: cluster.feed(order))
    end = cluster.run()
    if cluster.emitted(EventKind.STOP_UNDONE):
        assert (kind, end.outcome) == (StopKind.PAUSE, "SUCCEEDED")
    elif end.outcome != "SUCCEEDED":
        assert end.outcome == {"cancel": "CANCELLED", "pause": "PAUSED"}[kind], end
        assert cluster.now <= deadline + 0.001
    if end.outcome == "PAUSED":
        (event,) = cluster.emitted(EventKind.ENDED)
        assert event["durable_step"] is not None or cluster.core.committed == 0
