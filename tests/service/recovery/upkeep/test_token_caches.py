"""Agents learn which nodes may have token sets already."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from tests.support.simulation.core_states import running_state

from holdfast_service.recovery.core_state.state import CoreState
from holdfast_service.recovery.upkeep import command_retry
from holdfast_service.recovery.upkeep.token_caches import NEAR_NODES, near, near_hosts
from holdfast_service.recovery.world import attempt_formation
from holdfast_service.recovery.world.attempt_orders import form_orders
from holdfast_workers.protocol.commands import CommandKind, Fence, WarmUp
from holdfast_workers.protocol.messages import Partner
from holdfast_workers.spec import DataSpec, PreparedSpec, TrainingSpec

PREPARED = PreparedSpec(uri="/store", origin="web", digest="0" * 32, vocabulary=256, tokens=1000)


def state_with(*prepared: PreparedSpec) -> CoreState:
    return running_state(training=TrainingSpec(data=DataSpec(prepared=prepared)))


def partners(state: CoreState, *agents: str) -> tuple[Partner, ...]:
    return tuple(record.partner for name in agents if (record := state.roster.find(name)))


def test_the_nodes_with_ranks_know_each_other_and_a_standby_knows_them() -> None:
    state = state_with(PREPARED)
    world = state.worlds.present
    assert world is not None
    records = {record.agent: record for record in state.roster.live()}
    hosts = partners(state, "n0", "n1")
    assert len(hosts) == 2
    for _, order in form_orders(state, replace(world, store="n0"), records):
        assert order.caches == hosts
    standby = records["n2"]
    attempt_formation.warm_up(state, standby)
    world.repeat_later("n2", CommandKind.WARM_UP)
    command_retry.repeat_failed_commands(state)
    warmed = [effect for effect in state.take_effects() if isinstance(effect, WarmUp)]
    assert warmed == [WarmUp("n2", 1, standby.incarnation, hosts)] * 2


def test_a_new_node_knows_those_of_the_last_attempt_before_the_next_is_formed() -> None:
    """It needs the manifests to become ready."""
    state = state_with(PREPARED)
    state.worlds.end_present()
    state.take_effects()
    for record in state.roster.live():
        attempt_formation.fence(state, record)
    fences = [effect for effect in state.take_effects() if isinstance(effect, Fence)]
    assert len(fences) == 3
    assert {effect.caches for effect in fences} == {partners(state, "n0", "n1")}


def test_a_job_without_token_sets_sends_no_addresses() -> None:
    state = state_with()
    assert state.worlds.present is not None
    assert near(state, state.worlds.present.hosts_in_order(), "n0") == ()


def test_a_node_that_is_gone_is_none_of_them() -> None:
    state = state_with(PREPARED)
    state.roster.mark_lost("n1")
    assert state.worlds.present is not None
    assert near(state, state.worlds.present.hosts_in_order(), "n0") == partners(state, "n0")


@given(st.integers(1, 300), st.data())
def test_each_node_is_in_one_part_that_all_of_it_agree_on(count: int, data: st.DataObject) -> None:
    hosts = [f"n{n}" for n in range(count)]
    own = data.draw(st.sampled_from(hosts))
    part = near_hosts(hosts, own)
    assert own in part
    assert min(count, NEAR_NODES // 2) <= len(part) <= NEAR_NODES
    assert all(near_hosts(hosts, other) == part for other in part)
    assert near_hosts(hosts, "standby") == near_hosts(hosts, hosts[0])
