"""The end of a job whose ranks stop early by `evaluate.stop`, with faults at that moment."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from tests.support.simulation.core_config import core_config
from tests.support.simulation.simulated_cluster import SimulatedCluster
from tests.support.simulation.simulated_network import START

from holdfast_service.job_model.events.attempts import AttemptFormingEvent, RestorePlan
from holdfast_service.job_model.events.codec import numbered
from holdfast_service.job_model.events.progress import EndsEarlyEvent
from holdfast_service.job_model.supervisor_protocol import EventKind, StopKind
from holdfast_service.placement.world_shape import WorldShape
from holdfast_service.recovery.core_state import inputs
from holdfast_service.recovery.core_state.effects import Emit
from holdfast_service.recovery.core_state.event_replay import Facts

STEPS, LAST = 40, 12


def job(save_s: float = 0.3) -> SimulatedCluster:
    shape = WorldShape.of({"dp_shard": 2, "tp": 2}, 2)
    config = core_config((shape,), standby_nodes=1, steps=STEPS, wait_for_replacement_s=500.0)
    cluster = SimulatedCluster(config, 0)
    cluster.early_at = {4: LAST}
    cluster.save_s = save_s
    return cluster


def decided_at() -> float:
    """When the supervisor learns of the early stop, in seconds after the start."""
    cluster = job()
    cluster.run()
    (found,) = (event.at for event in cluster.events if event.kind == EventKind.ENDS_EARLY)
    return found - START


def assert_stopped_early(cluster: SimulatedCluster) -> None:
    end = cluster.run()
    assert (end.outcome, end.code, end.step) == ("SUCCEEDED", "stopped_early", LAST), end
    assert end.message == (
        f"stopped early at step {LAST}: eval_loss has not improved on 2.5 of step 10 in 2 "
        "evaluations, and the last checkpoint is durable"
    )
    assert max(step for _, step in cluster.committed) == LAST
    assert LAST in {checkpoint.step for checkpoint in cluster.remotes.values()}
    assert {event["step"] for event in cluster.emitted(EventKind.ENDS_EARLY)} == {LAST}


def lose_supervisor_and_rank(cluster: SimulatedCluster) -> None:
    cluster.restart_supervisor()
    cluster.kill_rank(2)


FAULTS: dict[str, Callable[[SimulatedCluster], None]] = {
    "rank": lambda cluster: cluster.kill_rank(1),
    "node": lambda cluster: cluster.kill_node("n0"),
    "supervisor": lambda cluster: cluster.restart_supervisor(),
    "supervisor and rank": lose_supervisor_and_rank,
    "signals": lambda cluster: cluster.lose_signals("n1", 1.0),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_at_the_moment_of_an_early_stop_changes_neither_its_step_nor_its_reason(
    fault: str,
) -> None:
    moment = decided_at()
    for tenth in range(-4, 8):
        cluster = job()
        cluster.at(moment + tenth / 10, partial(FAULTS[fault], cluster))
        assert_stopped_early(cluster)


def test_a_supervisor_that_begins_when_the_ranks_have_stopped_early_forms_no_attempt() -> None:
    cluster = job(save_s=2.0)
    cluster.at(decided_at() + 0.2, cluster.restart_supervisor)
    assert_stopped_early(cluster)
    assert len(cluster.emitted(EventKind.ATTEMPT_FORMING)) == 1


def test_a_supervisor_may_end_before_it_has_stored_that_the_ranks_have_stopped_early() -> None:
    cluster = job(save_s=2.0)

    def restart() -> None:
        cluster.events = [each for each in cluster.events if each.kind != EventKind.ENDS_EARLY]
        cluster.restart_supervisor()

    cluster.at(decided_at() + 0.2, restart)
    assert_stopped_early(cluster)
    assert len(cluster.emitted(EventKind.ATTEMPT_FORMING)) == 1


@pytest.mark.parametrize("save_s", [0.01, 0.3])
def test_a_last_checkpoint_that_fails_before_or_after_the_ranks_have_stopped_early_is_repeated(
    save_s: float,
) -> None:
    cluster = job(save_s)
    cluster.remote_every, cluster.shard_failures = 0, 1
    assert_stopped_early(cluster)
    (incident,) = cluster.emitted(EventKind.INCIDENT_CLOSED)
    assert incident["cause"] == "checkpoint_failed"


def test_a_pause_meanwhile_finds_a_job_that_is_done() -> None:
    cluster = job()
    pause = inputs.StopRequested(StopKind.PAUSE, "enough", START + 1000)
    cluster.at(decided_at() + 0.05, lambda: cluster.feed(pause))
    assert_stopped_early(cluster)


def test_a_pause_that_is_undone_meanwhile_costs_no_attempt() -> None:
    cluster = job(save_s=5.0)
    cluster.remote_every = 0
    moment = decided_at() + 0.05
    pause = inputs.StopRequested(StopKind.PAUSE, "enough", START + moment + 1.0)
    cluster.at(moment, lambda: cluster.feed(pause))
    assert_stopped_early(cluster)
    assert cluster.emitted(EventKind.STOP_UNDONE)
    assert len(cluster.emitted(EventKind.ATTEMPT_FORMING)) == 1


def test_ranks_of_another_mesh_that_begin_before_the_step_may_go_on_to_the_last() -> None:
    shapes = tuple(WorldShape.of({"dp_shard": size}, 1) for size in (2, 1))
    config = core_config(
        shapes, standby_nodes=0, steps=STEPS, wait_for_replacement_s=500.0, grow_after_s=500.0
    )
    cluster = SimulatedCluster(config, 0, remote_every=5)
    cluster.early_at = {2: LAST}

    def lose() -> None:
        for agent in cluster.agents:
            cluster.make_copies_unreadable(agent)
        cluster.kill_node("n1")

    cluster.observers.append(lambda effect: cluster.at(0.02, lose) if is_early(effect) else None)
    end = cluster.run()
    assert cluster.emitted(EventKind.ENDS_EARLY)
    assert (end.outcome, end.code, end.step) == ("SUCCEEDED", "succeeded", STEPS), end


def is_early(effect: object) -> bool:
    return isinstance(effect, Emit) and isinstance(effect.event, EndsEarlyEvent)


def test_an_attempt_that_begins_before_the_step_decides_anew() -> None:
    early = EndsEarlyEvent(step=LAST, reason="")

    def formed_from(step: int) -> AttemptFormingEvent:
        return AttemptFormingEvent(
            attempt=2,
            mesh={"dp_shard": 1},
            world_size=1,
            members=(),
            restore=RestorePlan(step=step, attempt=1),
        )

    def known(*events: EndsEarlyEvent | AttemptFormingEvent) -> EndsEarlyEvent | None:
        return Facts.from_events([numbered(i, 0.0, each) for i, each in enumerate(events)]).early

    assert known(early) == known(early, formed_from(LAST)) == early
    assert known(early, formed_from(LAST - 1)) is None
