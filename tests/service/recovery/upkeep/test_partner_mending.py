"""Replication partners after failures, on the simulated cluster."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.simulation.simulated_cluster import SimulatedCluster
from tests.support.simulation.simulated_jobs import cluster, forming, present, running

from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_service.recovery.core_state import inputs
from holdfast_service.recovery.core_state.stage_timer import Stage
from holdfast_workers.protocol import commands
from holdfast_workers.protocol.messages import Place
from holdfast_workers.protocol.signals import PartnerLost, Signal


def two_nodes(**changes: Any) -> SimulatedCluster:
    fields = {"mesh": {"tp": 2}, "workers_per_node": 1, "steps": 200}
    return cluster(standbys=0, **{**fields, **changes})


def placed(job: SimulatedCluster) -> list[dict[str, list[str]]]:
    return [event["partners"] for event in job.emitted(EventKind.MEMORY_PLACED)]


def newest_replica(job: SimulatedCluster, rank: int) -> int:
    return max(
        held.step
        for agent in job.agents.values()
        for held in agent.memory.get((Place.REPLICA, rank), [])
    )


def test_the_only_available_partner_stays_when_replication_to_it_fails_for_a_while() -> None:
    job = running(two_nodes())
    job.break_link(0, for_s=2.0)
    job.run_until(lambda: len(placed(job)) == 2)
    assert placed(job)[-1] == {"0": [], "1": ["n0"]}  # the link does not count meanwhile
    before = newest_replica(job, 0)
    job.run_until(lambda: newest_replica(job, 0) > before + 10)
    assert job.agents["n0"].partners[0] == ("n1",)


def test_a_failed_link_counts_again_after_a_while() -> None:
    job = running(two_nodes(avoid_link_s=5.0, steps=300))
    job.break_link(0, for_s=2.0)
    job.run_until(lambda: len(placed(job)) == 3)
    assert placed(job)[-1] == {"0": ["n1"], "1": ["n0"]}
    assert not job.core.state.nodes.bad_links


def test_a_world_formed_soon_after_a_link_failure_still_has_its_partner() -> None:
    job = running(two_nodes())
    job.break_link(0)
    job.run_until(lambda: len(placed(job)) == 2)
    job.kill_rank(1)
    job.run_until(lambda: len(job.orders) == 2)
    partners = {seat.rank: seat.partners for seat in job.orders[2].seats}
    assert [partner.agent for partner in partners[0]] == ["n1"]


def test_a_failed_change_of_partners_is_repeated() -> None:
    job = running(cluster(standbys=2, steps=200))
    host = present(job)[0].agent
    before = dict(job.agents[host].partners)
    job.agents[host].refused.add("set_partners")
    job.break_link(0, for_s=0.0)
    job.run_until(lambda: not job.agents[host].refused)
    expected = {rank: tuple(placed(job)[-1][str(rank)]) for rank in before}
    assert job.agents[host].partners != expected != before
    job.run_until(lambda: job.agents[host].partners == expected)


def test_no_replica_is_freed_before_its_owner_confirms_a_new_partner() -> None:
    """The command fails only after the time that new partners have to catch up."""
    job = running(cluster(standbys=2, steps=200, free_after_s=0.0), step=5)
    core = job.core
    member = present(job)[0]
    (former,) = member.partners
    failed = Signal(
        PartnerLost(former),
        member.agent,
        member.incarnation,
        999,
        job.now,
        core.attempt,
        0,
        member.worker,
    )
    effects = core.handle(inputs.Signals((failed,)), job.now)
    asked = [effect for effect in effects if isinstance(effect, commands.SetPartners)]
    step = inputs.StepCommitted(core.attempt, core.committed, core.committed)
    for command in asked:
        assert not core.handle(step, job.now + 1.0)
        names = tuple(partner.agent for partner in command.partners)
        answer = inputs.PartnersSet(
            command.agent, core.attempt, command.rank, names, command.incarnation
        )
        core.handle(answer, job.now + 1.0)
    freed = core.handle(step, job.now + 1.0)
    assert {effect.agent for effect in freed if isinstance(effect, commands.FreeMemory)} == set(
        job.agents
    )


@pytest.mark.parametrize("command", [commands.FreeMemory, commands.SetIntervals, commands.WarmUp])
def test_a_failed_upkeep_command_is_repeated_with_the_next_steps(
    command: type[commands.FreeMemory | commands.SetIntervals | commands.WarmUp],
) -> None:
    job = running(cluster(free_after_s=0.0))
    core, agent = job.core, "n2" if command is commands.WarmUp else "n0"
    step = inputs.StepCommitted(core.attempt, core.committed, core.committed)
    core.handle(step, job.now)
    assert not core.handle(step, job.now)
    core.handle(inputs.CommandFailed(agent, command.kind, core.attempt, "timed out"), job.now)
    again = core.handle(step, job.now)
    assert agent in {effect.agent for effect in again if isinstance(effect, command)}
    assert not core.handle(step, job.now)


def test_a_lost_standby_partner_is_replaced_while_training_continues() -> None:
    job = running(cluster(standbys=2, mesh={"tp": 2}))
    first = job.agents["n0"].partners
    lost = first[0][0]
    job.kill_node(lost)
    (other,) = {"n1", "n2"} - {lost}
    job.run_until(lambda: job.agents["n0"].partners == {0: (other,), 1: (other,)})
    assert len(forming(job)) == 1


def test_former_partners_free_their_copies_once_new_partners_have_caught_up() -> None:
    job = running(cluster(standbys=2, free_after_s=1.0))
    host = next(name for name, agent in job.agents.items() if 0 in agent.partners)
    (partner,) = job.agents[host].partners[0]
    job.kill_agent(partner, back_after_s=0.5)
    assert job.agents[partner].memory[Place.REPLICA, 0]
    job.run_until(lambda: len(forming(job)) == 2 and job.core.stage is Stage.RUNNING)
    assert job.agents[partner].memory
    job.run_until(lambda: not job.agents[partner].memory)
    placed = job.emitted(EventKind.MEMORY_PLACED)[-1]["partners"]
    assert partner not in {name for those in placed.values() for name in those}
    assert job.run().outcome == "SUCCEEDED"


def test_a_lost_partner_is_replaced_and_the_other_partner_stays() -> None:
    job = running(cluster(standbys=2, memory={"copies": 2}))
    first = {name: dict(agent.partners) for name, agent in job.agents.items()}
    assert {len(those) for held in first.values() for those in held.values()} == {2}
    job.break_link(0)
    (host,) = [name for name, held in first.items() if 0 in held]
    gone, stays = first[host][0]
    (spare,) = set(job.agents) - {host, gone, stays}
    job.run_until(lambda: set(job.agents[host].partners[0]) == {stays, spare})
    assert len(job.emitted(EventKind.MEMORY_PLACED)) == 2
    assert len(forming(job)) == 1
    assert job.run().outcome == "SUCCEEDED"
