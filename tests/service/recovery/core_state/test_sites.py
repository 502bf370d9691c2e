"""The failure domain of agents without a label of one: their machine."""

from __future__ import annotations

from collections import Counter

from hypothesis import example, given
from hypothesis import strategies as st
from tests.support.simulation.simulated_agent import SimAgent
from tests.support.simulation.simulated_jobs import cluster

from holdfast_service.placement.durability import gaps
from holdfast_service.placement.replica_placement import Placement, place_partners
from holdfast_service.recovery.core_state.roster import AgentRecord, sites

CONFIG = next(iter(cluster().agents.values())).config


def records(machines: list[str], domains: list[str] | None = None) -> list[AgentRecord]:
    """An agent for each entry, on this machine; "": its machine is not known."""
    labels = domains or [""] * len(machines)
    return [
        AgentRecord(SimAgent(f"n{i}", CONFIG, machine=machine, domain=label).report())
        for i, (machine, label) in enumerate(zip(machines, labels, strict=True))
    ]


def placed(agents: list[AgentRecord]) -> Placement:
    """One rank on each agent."""
    seats = {rank: record.agent for rank, record in enumerate(agents)}
    return place_partners({"dp_shard": len(seats)}, seats, sites(agents))


@example(["a", "a", "b", "b"])
@example(["a", "a"])
@given(st.lists(st.sampled_from(["a", "b", "c", ""]), min_size=2, max_size=8))
def test_copies_lie_on_another_machine_wherever_loads_allow_and_always_somewhere(
    machines: list[str],
) -> None:
    found = placed(records(machines))
    assert all(partners for partners in found.partners.values())
    assert found.cost.missing == 0
    known = Counter(machine for machine in machines if machine)
    if known and max(known.values()) * 2 <= len(machines):
        for rank, (partner,) in found.partners.items():
            there = machines[int(partner[1:])]
            assert not machines[rank] or there != machines[rank], found.partners


@given(st.integers(2, 6))
def test_agents_that_are_all_on_one_machine_are_placed_as_if_machines_were_unknown(
    agents: int,
) -> None:
    one, unknown = placed(records(["a"] * agents)), placed(records([""] * agents))
    assert one.partners == unknown.partners
    assert gaps(one) == gaps(unknown), "nothing is said of the only machine"


def test_a_label_counts_before_the_machine() -> None:
    racks = ["r1", "r2", "r1", "r2"]
    assert [site.domain for site in sites(records(["a", "a", "b", "b"], racks))] == racks
    mixed = sites(records(["a", "a", "b"], ["", "rack", ""]))
    assert [site.domain for site in mixed] == ["machine of n0", "rack", ""]


def test_states_that_only_one_machine_has_are_named_with_an_agent_of_it() -> None:
    found = placed(records(["a", "a", "a", "b"]))
    texts = [gap.text for gap in gaps(found)]
    assert any("losing the failure domain machine of n0 would lose the memory" in t for t in texts)
