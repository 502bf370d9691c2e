"""Proofs that the hosts of an ended world step no more."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.support.simulation.core_config import core_config
from tests.support.simulation.simulated_agent import SimAgent

from holdfast_service.placement.world_shape import WorldShape
from holdfast_service.recovery.core_state.fencing import Fencing
from holdfast_service.recovery.core_state.roster import Roster

HOSTS = (("n0", "i1"), ("n1", "i1"))
CONFIG = core_config((WorldShape.of({"dp_shard": 2}, 1),), standby_nodes=0, steps=1)


def roster(*agents: str) -> Roster:
    """A roster that has a report of these agents."""
    known = Roster()
    for agent in agents:
        known.record_report(SimAgent(agent, CONFIG).report())
    return known


def fencing(*, leased: bool = True) -> Fencing:
    fencing = Fencing(leased)
    fencing.require_proof(HOSTS)
    return fencing


def test_with_leases_each_host_needs_a_proof_of_its_own() -> None:
    state = fencing()
    state.record_answer("n0", "i1")
    assert state.unproven == {("n1", "i1")}
    assert state.is_proof_missing(roster("n0", "n1"))
    state.record_ended("n1", "i1")
    assert not state.is_proof_missing(roster("n0", "n1"))
    assert ("n1", "i1") in state.dead


@pytest.mark.parametrize("leased", [True, False])
def test_without_leases_one_proof_counts_for_all_hosts(leased: bool) -> None:
    proofs: list[Callable[[Fencing], None]] = [
        lambda state: state.record_stopped("n0", "i1"),
        lambda state: state.record_replaced("n0"),
        Fencing.record_member_left,
    ]
    for record in proofs:
        state = fencing(leased=leased)
        record(state)
        assert bool(state.unproven) is leased


def test_a_proof_of_another_incarnation_proves_nothing() -> None:
    for leased in (True, False):
        state = fencing(leased=leased)
        state.record_stopped("n0", "i2")
        assert state.unproven == set(HOSTS)


def test_an_ended_lease_of_an_unknown_incarnation_counts_only_if_it_sent_no_report() -> None:
    state = fencing()
    for agent, _ in HOSTS:
        state.record_lease_ended(agent, "")
    assert state.is_proof_missing(roster("n0", "n1"))
    assert not state.is_proof_missing(roster())


def test_a_report_revokes_the_end_of_a_lease() -> None:
    state = fencing()
    for agent, incarnation in HOSTS:
        state.record_lease_ended(agent, incarnation)
    state.record_alive("n0", "i1")
    assert state.is_proof_missing(roster("n0", "n1"))
    assert state.unproven == {("n0", "i1")}


def test_a_report_from_before_the_fence_changes_nothing_of_its_answer() -> None:
    known, agent = Roster(), SimAgent("n0", CONFIG)
    known.record_report(agent.report())
    late = agent.report()
    agent.start_store()
    known.record_fence_answer(agent.report(), 3)
    known.record_report(late)
    record = known.find("n0")
    assert record is not None and record.report.store_port == agent.store_port
