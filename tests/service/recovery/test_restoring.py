"""The choice of the saved state that a world restores, on the simulated cluster."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.simulation.core_states import running_state
from tests.support.simulation.simulated_cluster import SimulatedCluster
from tests.support.simulation.simulated_jobs import closed, cluster, forming, running

from holdfast_service.job_model.supervisor_protocol import EventKind, Phase
from holdfast_service.placement.restore_points import RemoteCheckpoint
from holdfast_service.placement.world_shape import WorldShape
from holdfast_service.recovery.core_state import inputs
from holdfast_service.recovery.core_state.stage_timer import Stage
from holdfast_service.recovery.faults import judgement
from holdfast_service.recovery.signals import signal_handlers
from holdfast_workers.protocol.messages import Origin, Place, Restore, Tier
from holdfast_workers.protocol.signals import Signal, SourcesLost

ORIGINS = (
    Origin(0, "n0", Place.OWN, "n0", 1, "d"),
    Origin(1, "n1", Place.REPLICA, "n1", 1, "d"),
)
RESHARD = Restore(Tier.RESHARD, 9, 1, mesh="dp_shard=1,tp=2", origins=ORIGINS)


def test_sources_of_a_failed_reshard_are_excluded_for_their_agents_incarnation() -> None:
    state = running_state(restores={3: RESHARD})
    judgement.distrust_source(state, 3, for_ever=False, why="not covered")
    bad = state.saves.bad_copies
    assert {(copy.agent, copy.place, copy.rank, copy.attempt, copy.step) for copy in bad} == {
        ("n0", Place.OWN, 0, 1, 9),
        ("n1", Place.REPLICA, 1, 1, 9),
    }
    assert all(copy.incarnation for copy in bad)
    assert not state.saves.bad_uris


def test_a_failed_reshard_excludes_only_the_sources_that_failed() -> None:
    state = running_state(restores={3: RESHARD})
    detail = SourcesLost((("n1", Place.REPLICA, 1),), "n1, rank 1: gone")
    lost = Signal(detail, "n1", "i1", 1, 0.0, 1, 3)
    signal_handlers.handle_signal(state, lost, 0.0)
    judgement.distrust_source(state, 3, for_ever=False, why="RestoreFailed: not covered")
    bad = state.saves.bad_copies
    assert {(copy.agent, copy.place, copy.rank) for copy in bad} == {("n1", Place.REPLICA, 1)}
    assert all(copy.incarnation for copy in bad)


@pytest.mark.parametrize(
    ("job", "tier"),
    [({"command": ("train",)}, "own_ram"), ({"function": "x:y"}, "own_ram"), ({}, "reshard")],
)
def test_the_state_of_a_lost_replica_is_in_memory_and_the_event_names_where(
    job: dict[str, Any], tier: str
) -> None:
    """The standby takes the rank. A payload of the rank's own is at its partner; of equal ones the
    living replica's is enough."""
    world = running(
        cluster(
            mesh={"dp_replicate": 2},
            workers_per_node=1,
            steps=60,
            **job,
        )
    )
    held = world.agents["n0"].memory
    assert (Place.REPLICA in {place for place, _ in held}) == (tier != "reshard")
    world.kill_node("n1", back_after_s=None)
    world.run_until(lambda: len(closed(world)) == 1)
    restore = forming(world)[-1]["restore"]
    assert restore["step"] >= 9
    assert restore["tiers"]["0"] == tier
    placed = world.emitted(EventKind.MEMORY_PLACED)[-1]
    assert placed["recoverable"]["1"]["probability"] == 1.0
    assert any(placed["partners"].values()) == (tier != "reshard")


def test_an_unreadable_copy_is_skipped_for_the_next_copy() -> None:
    job = running(cluster())
    job.make_copies_unreadable("n0")
    job.kill_rank(2)
    assert job.run().outcome == "SUCCEEDED"
    first, second = forming(job)[1:3]
    assert first["restore"]["sources"]["0"] == "n0"
    assert second["restore"]["sources"]["0"] == "n1"
    assert "bad_state" in closed(job)[0]["causes"]


def test_a_nonfinite_step_after_a_restore_falls_back_to_an_older_state() -> None:
    """The older state is good; the partners' copies of the newer state are no better."""
    job = running(cluster())
    newest = max(held.step for held in job.agents["n0"].memory[Place.OWN, 0])
    job.poisoned = {(place, step) for place in Place for step in range(newest, newest + 3)}
    job.kill_rank(1)
    job.run_until(lambda: len(closed(job)) == 1)
    (incident,) = closed(job)
    assert incident["causes"][:2] == ["worker_crash", "not_finite"]
    steps = [event["restore"]["step"] for event in forming(job)]
    assert steps[1] >= newest > steps[-1] > 0
    assert len(set(steps)) == len(steps)
    assert {(copy["place"], copy["step"]) for copy in incident["bad"]} >= {("own", steps[1])}
    job.poisoned = set()
    assert job.run().outcome == "SUCCEEDED"


def test_a_damaged_remote_checkpoint_is_emitted_once_despite_a_restart() -> None:
    job = running(cluster(steps=60), step=5)
    damaged = inputs.DamagedCheckpoint(3, "mem://3.1", "the manifest is torn")
    for _ in range(2):
        job.feed(inputs.RemoteCheckpoints((), (damaged,)))
    job.restart_supervisor()
    job.run_until(lambda: job.core.phase is Phase.RUNNING)
    job.feed(inputs.RemoteCheckpoints((), (damaged,)))
    (event,) = job.emitted(EventKind.CHECKPOINT_BAD)
    assert (event["step"], event["uri"], event["message"]) == (3, damaged.uri, damaged.why)


def test_a_remote_checkpoint_is_restored_if_no_state_in_memory_gives_a_finite_step() -> None:
    job = running(cluster(steps=60), step=25)
    job.remotes["mem://20.1"] = RemoteCheckpoint(20, 1, "mem://20.1")
    job.feed(inputs.RemoteCheckpoints(tuple(job.remotes.values())))
    job.poisoned = {(place, step) for place in Place for step in range(60)}
    job.kill_rank(1)
    job.run_until(lambda: len(closed(job)) == 1)
    assert forming(job)[-1]["restore"]["step"] == 20
    assert set(forming(job)[-1]["restore"]["tiers"].values()) == {"remote"}


def test_the_job_fails_with_a_reason_if_no_saved_state_gives_a_finite_step() -> None:
    job = running(cluster())
    job.poisoned = {(place, step) for place in Place for step in range(60)}
    job.kill_rank(1)
    end = job.run()
    assert (end.outcome, end.code) == ("FAILED", "not_finite")
    assert "from every saved state" in end.message
    assert len(forming(job)) < 10


def test_a_step_that_is_nonfinite_by_itself_is_a_user_error_and_blames_no_state() -> None:
    job = cluster()
    job.not_finite_at = 12
    end = job.run()
    assert (end.outcome, end.code) == ("FAILED", "user_error")
    assert not any(event["bad"] for event in job.emitted(EventKind.INCIDENT_UPDATED))


SILENT = inputs.RemoteCheckpoints((), known=False, problem="it was silent for 10 s")


def _successor_without_a_remote_tier(job: SimulatedCluster) -> None:
    """A new supervisor, whose remote tier never answers, has to form an attempt."""
    job.restart_supervisor()
    job.feed(SILENT)
    job.run_until(lambda: job.core.stage is Stage.RUNNING)


def test_a_state_that_is_whole_in_memory_needs_no_answer_of_the_remote_tier() -> None:
    """A node is lost for good: each shard is still on another node, as the former mesh cut it."""
    shapes = tuple(WorldShape.of({"dp_shard": ranks}, 1) for ranks in (4, 3))
    job = running(cluster(standbys=0, shapes=shapes, steps=60))
    _successor_without_a_remote_tier(job)
    job.kill_node("n3", back_after_s=None)
    job.run_until(lambda: job.ended is not None or len(closed(job)) == 1)
    assert job.ended is None, job.ended
    assert set(closed(job)[0]["tiers"].values()) == {"reshard"}
    assert not job.emitted(EventKind.WAITING)


def test_a_job_waits_for_a_silent_remote_tier_no_longer_than_memory_suffices() -> None:
    """An agent has published a checkpoint that is newer than what memory has."""
    job = running(cluster(steps=60))
    _successor_without_a_remote_tier(job)
    at = job.core.committed + 5
    job.feed(inputs.CheckpointFinalized(at, 1, "mem://newer", 1))
    job.kill_rank(1)
    job.run_until(lambda: job.ended is not None or len(closed(job)) == 1)
    assert job.ended is None, job.ended
    (waiting,) = job.emitted(EventKind.WAITING)
    assert "it was silent for 10 s" in waiting["resource"]
    assert 0 < forming(job)[-1]["restore"]["step"] < at
    assert set(closed(job)[0]["tiers"].values()) <= {"own_ram", "partner_ram"}


def test_a_silent_remote_tier_never_makes_a_job_begin_anew() -> None:
    job = running(cluster())
    _successor_without_a_remote_tier(job)
    for agent in job.agents.values():
        agent.memory.clear()
    job.kill_rank(1)
    end = job.run()
    assert (end.outcome, end.code) == ("FAILED", "no_replacement")
    assert "it was silent for 10 s" in end.message
    assert len(forming(job)) == 1
