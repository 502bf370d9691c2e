"""Loss of nodes, agents, zygotes, standbys and the supervisor: same bits, or a stated reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.chaos.conftest import ENDS_WHEN_TOLD, STEPS, Undisturbed
from tests.support.nodes.history_proof import assert_same_history, incidents, not_fired
from tests.support.nodes.supervised import SupervisedRun, small_training, supervised

from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_service.supervisor.supervisor_times import SupervisorTimes
from holdfast_workers.checkpoint.load import load_state
from holdfast_workers.checkpoint.manifest import checkpoint_folder, complete_manifest, verify
from holdfast_workers.memory.segment import Segment
from holdfast_workers.protocol.answers import AgentReport
from holdfast_workers.protocol.messages import Place
from holdfast_workers.spec import CheckpointSpec, MemoryTierSpec, RemoteTierSpec
from holdfast_workers.state.digest import payload_digest, step_digest

pytestmark = pytest.mark.chaos


@pytest.mark.soak
def test_with_two_copies_two_nodes_may_be_lost_at_once(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """Both nodes would be each other's partners with one copy; there is no remote tier."""
    checkpoint = CheckpointSpec(
        memory=MemoryTierSpec(every_steps=1, copies=2), remote=RemoteTierSpec(every_steps=0)
    )
    training = small_training(STEPS, checkpoint=checkpoint, recipe=ENDS_WHEN_TOLD)
    config = {"free_after_s": 0.5}
    with supervised(tmp_path, training, standbys=2, workers_per_node=1, config=config) as run:
        run.wait_step(15)
        (placed,) = run.of(EventKind.MEMORY_PLACED)
        assert placed["recoverable"]["2"] == {"probability": 1.0, "standard_error": 0.0}
        assert {len(partners) for partners in placed["partners"].values()} == {2}
        lost = {run.seat_of(0), run.seat_of(3)}
        for seat in lost:
            run.agents.kill_node(seat)
        assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
        assert_same_history(run, undisturbed)
        for incident in incidents(run):
            assert incident["steps_lost"] <= 1
            assert set(incident["tiers"].values()) == {"own_ram", "partner_ram"}, run.story()
        again = run.of(EventKind.MEMORY_PLACED)[-1]["partners"]
        assert not lost & {seat for partners in again.values() for seat in partners}


def test_a_node_and_the_supervisor_on_it_are_lost_at_once(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """The next supervisor knows the seats only from the events, and moves no living rank.

    No process of the node can prove its end, so the next attempt waits for the end of the leases
    of the former supervisor (`RecoveryConfig.lapse_s`): these are shorter here."""
    training = small_training(STEPS, recipe=ENDS_WHEN_TOLD)
    leases = {"lease_s": 2.0, "adopt_timeout_s": 5.0}
    with supervised(tmp_path, training, standbys=1, config=leases) as run:
        run.wait_step(20)
        lost, kept = run.seat_of(0), run.seat_of(2)
        pids = {rank: pid for rank, pid in run.pids().items() if rank in (2, 3)}
        run.supervisor.halt()
        run.agents.kill_node(lost)
        run.lose_supervisor()
        assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
        assert_same_history(run, undisturbed)
        (incident,) = incidents(run)
        assert incident["steps_lost"] <= 1
        members = run.of(EventKind.ATTEMPT_RUNNING)[-1]["members"]
        assert {member["rank"] for member in members if member["agent"] == kept} == {2, 3}
        stuck = str(incident["evidence"]).count("slept on after its connections were cut")
        moved = [
            member
            for member in members
            if member["rank"] in pids and member["pid"] != pids[member["rank"]]
        ]
        assert len(moved) <= stuck, run.story()


@pytest.mark.cell("P6", "agent")
def test_all_agents_and_the_supervisor_end_at_once_and_no_row_is_lost(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """The rows since the last poll are in shared memory, beside the state that is restored."""
    times = SupervisorTimes(poll_s=1.0)
    with supervised(
        tmp_path, small_training(STEPS, recipe=ENDS_WHEN_TOLD), standbys=0, times=times
    ) as run:
        run.wait_step(10)
        run.wait(lambda: max(kept_steps(run)) > 12)  # some of their rows nobody has fetched
        run.supervisor.halt()
        for seat in run.agents.seats:
            run.agents.kill(seat)
        run.lose_supervisor()
        assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
        assert_same_history(run, undisturbed)
        assert set(run.rows) == set(range(1, STEPS + 1))
        assert set(run.digests) >= set(range(1, STEPS + 1))
        restored = [event["restore"]["step"] for event in run.of(EventKind.ATTEMPT_FORMING)][-1]
        assert restored > 10, "the state was restored from memory"


def test_a_remote_save_is_completed_from_the_partners_when_its_node_dies(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """The savers of ranks 0 and 1 hang in step 20 when their node dies with their source: the
    partners save the same state, and the checkpoint has the undisturbed content."""
    plan: list[dict[str, Any]] = [
        {"point": "saver", "rank": rank, "step": 20, "action": "stop"} for rank in (0, 1)
    ]
    # Otherwise step 30 might replace step 20 in memory before the test checks.
    plan.append(
        {"point": "forward", "rank": 2, "step": 22, "action": "slow", "factor": 8.0, "steps": 8}
    )
    checkpoint = CheckpointSpec(
        memory=MemoryTierSpec(every_steps=10), remote=RemoteTierSpec(every_steps=20, keep=5)
    )
    training = small_training(STEPS, checkpoint=checkpoint, recipe=ENDS_WHEN_TOLD)
    with supervised(tmp_path, training, standbys=1, chaos=plan) as run:
        run.wait(lambda: not not_fired(run, plan) and kept_for_others(run, 20) >= {0, 1})
        run.agents.kill_node(run.seat_of(0))
        assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
        assert run.digests[STEPS] == undisturbed.digests[STEPS]
        saved = [(event["attempt"], event["step"]) for event in run.of(EventKind.CHECKPOINT_SAVED)]
        assert (1, 20) in saved, run.story()
        assert saved_digest(run, 1, 20) == undisturbed.digests[20]
        run.wait(lambda: not list(run.agents.root.glob("*/save-*.seg")))


def kept_for_others(run: SupervisedRun, step: int) -> set[int]:
    """The ranks whose partner holds their state at `step`."""
    held = (shard for report in reports(run) for shard in report.held)
    return {shard.rank for shard in held if (shard.place, shard.step) == (Place.REPLICA, step)}


def kept_steps(run: SupervisedRun) -> set[int]:
    """The steps that are in the nodes' memory."""
    return {0, *(shard.step for report in reports(run) for shard in report.held)}


def reports(run: SupervisedRun) -> list[AgentReport]:
    return [run.agents.report(seat) for seat in run.agents.seats]


def saved_digest(run: SupervisedRun, attempt: int, step: int) -> str:
    """The digest of a step, computed from its verified remote checkpoint."""
    at = run.remote.below(checkpoint_folder(step, attempt))
    verify(at)
    assert set(complete_manifest(at).metrics) == {"loss", "grad_norm"}
    digests = []
    for rank in range(run.training.parallel.world_size):
        segment = next(run.agents.root.glob(f"*/*/own-{rank}.seg"))
        layout = Segment.open(segment, writable=False).layout
        payload = memoryview(bytearray(layout.payload_bytes))
        load_state(at, layout, payload, mesh=run.training.parallel.mesh, rank=rank)
        digests.append(payload_digest(payload))
    return step_digest(digests)
