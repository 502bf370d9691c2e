"""Rank assignment: survivors stay, free ranks are filled in order, capacity is never exceeded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast_service.placement.rank_assignment import (
    Assignment,
    CandidateNode,
    GroupHome,
    IdleWorker,
    Shortage,
    assign,
)

GROUPS = ((0, 1), (2, 3))


def node(
    agent: str, *workers: IdleWorker, domain: str = "", capacity: int = 2, ready: bool = True
) -> CandidateNode:
    return CandidateNode(agent, domain, capacity, ready, tuple(workers))


def seats(result: Assignment | Shortage) -> dict[int, tuple[str, str | None]]:
    assert isinstance(result, Assignment), result
    return {placed.rank: (placed.agent, placed.worker) for placed in result.placed}


def test_a_crashed_process_on_a_healthy_agent_is_forked_again_there() -> None:
    homes = {0: GroupHome("n0", "", True), 1: GroupHome("n1", "", True)}
    nodes = [
        node("n0", IdleWorker("a", 0)),
        node("n1", IdleWorker("c", 2), IdleWorker("d", 3)),
        node("n2", IdleWorker("x"), IdleWorker("y")),
    ]
    assert seats(assign(GROUPS, homes, nodes)) == {
        0: ("n0", "a"),
        1: ("n0", None),
        2: ("n1", "c"),
        3: ("n1", "d"),
    }


def test_a_process_that_had_a_rank_takes_no_other() -> None:
    """It was built for its place in the mesh; without known homes, new processes are forked."""
    nodes = [
        node("n1", IdleWorker("c", 2), IdleWorker("d", 3)),
        node("n2", IdleWorker("x"), IdleWorker("y")),
    ]
    assert seats(assign(GROUPS, {}, nodes)) == {
        0: ("n1", None),
        1: ("n1", None),
        2: ("n2", "x"),
        3: ("n2", "y"),
    }


def test_a_standby_takes_all_ranks_of_a_lost_agent_with_its_warm_workers() -> None:
    homes = {0: GroupHome("n0", "", False), 1: GroupHome("n1", "", True)}
    nodes = [
        node("n1", IdleWorker("c", 2), IdleWorker("d", 3)),
        node("n2", IdleWorker("x"), IdleWorker("y")),
    ]
    result = assign(GROUPS, homes, nodes)
    assert seats(result)[0] == ("n2", "x")
    assert seats(result)[1] == ("n2", "y")
    assert isinstance(result, Assignment)
    assert result.moved == (0,)


def test_the_same_failure_domain_comes_first() -> None:
    homes = {0: GroupHome("n0", "rack-b", False), 1: GroupHome("n1", "rack-a", True)}
    nodes = [
        node("n1", IdleWorker("c", 2), domain="rack-a"),
        node("n2", IdleWorker("x"), IdleWorker("y"), domain="rack-a"),
        node("n3", domain="rack-b"),
    ]
    assert seats(assign(GROUPS, homes, nodes))[0] == ("n3", None)


def test_neighbours_in_rank_order_are_placed_in_one_domain() -> None:
    nodes = [
        node("n0", domain="rack-a"),
        node("n1", domain="rack-b"),
        node("n2", domain="rack-b"),
        node("n3", domain="rack-c", ready=False),
        node("n4", domain="rack-a"),
        node("n5", domain="rack-b"),
    ]
    groups = tuple((2 * index, 2 * index + 1) for index in range(5))
    placed = seats(assign(groups, {}, nodes))
    assert [placed[rank][0] for rank in range(0, 10, 2)] == ["n1", "n2", "n5", "n0", "n4"]


def test_agents_with_a_domain_each_are_taken_by_warm_workers_and_name() -> None:
    nodes = [node("n0", domain="z"), node("n1", IdleWorker("w"), domain="y")]
    assert seats(assign(((0, 1),), {}, nodes))[0] == ("n1", "w")


def test_a_restarted_agent_takes_its_group_if_there_is_no_standby() -> None:
    homes = {0: GroupHome("n0", "", False), 1: GroupHome("n1", "", True)}
    nodes = [node("n0", IdleWorker("new")), node("n1", IdleWorker("c", 2), IdleWorker("d", 3))]
    assert seats(assign(GROUPS, homes, nodes))[0] == ("n0", "new")


def test_free_capacity_on_an_agent_with_ranks_is_the_last_choice() -> None:
    homes = {0: GroupHome("n0", "", False), 1: GroupHome("n1", "", True)}
    big = node("n1", IdleWorker("c", 2), IdleWorker("d", 3), capacity=4)
    assert seats(assign(GROUPS, homes, [big]))[0] == ("n1", None)
    assert seats(assign(GROUPS, homes, [big, node("n2")]))[0] == ("n2", None)


def test_a_shortage_names_the_ranks_without_room() -> None:
    homes = {0: GroupHome("n0", "", False), 1: GroupHome("n1", "", True)}
    unready = node("n2", ready=False)
    assert assign(GROUPS, homes, [node("n1"), unready]) == Shortage((0, 1))


def test_an_agent_whose_zygote_is_restarting_keeps_its_ranks() -> None:
    homes = {0: GroupHome("n0", "", True), 1: GroupHome("n1", "", True)}
    nodes = [
        node("n0", IdleWorker("a", 0), IdleWorker("b", 1), ready=False),
        node("n1"),
        node("n2"),
    ]
    assert seats(assign(GROUPS, homes, nodes))[1] == ("n0", "b")


def names(result: Assignment | Shortage) -> list[str | None]:
    """The workers of ranks 0 and 1, which are both on `n0`."""
    first, second = (seats(result)[rank] for rank in (0, 1))
    assert first[0] == second[0] == "n0"
    return [first[1], second[1]]


def test_a_worker_prepared_for_a_rank_takes_only_that_rank_and_only_if_it_is_free() -> None:
    homes = {0: GroupHome("n0", "", True), 1: GroupHome("n1", "", True)}
    spares = [IdleWorker("for 0", 0, spare=True), IdleWorker("for 1", 1, spare=True)]
    whole = node("n0", *spares, IdleWorker("a", 0), IdleWorker("b", 1))
    others = node("n1", IdleWorker("c", 2), IdleWorker("d", 3))
    assert names(assign(GROUPS, homes, [whole, others])) == ["a", "b"]
    halved = node("n0", *spares, IdleWorker("a", 0), IdleWorker("any"))
    assert names(assign(GROUPS, homes, [halved, others])) == ["a", "for 1"]
    unready = node("n0", spares[0], IdleWorker("a", 0), IdleWorker("any"))
    assert names(assign(GROUPS, homes, [unready, others])) == ["a", "any"]


@given(
    capacities=st.lists(st.integers(1, 5), max_size=6),
    per_node=st.integers(1, 3),
    world=st.integers(1, 9),
    warm=st.lists(st.integers(0, 5), min_size=6, max_size=6),
    alive=st.sets(st.integers(0, 8)),
)
def test_every_rank_is_assigned_once_within_capacity_or_a_shortage_is_named(
    capacities: list[int], per_node: int, world: int, warm: list[int], alive: set[int]
) -> None:
    groups = [
        tuple(range(start, min(start + per_node, world))) for start in range(0, world, per_node)
    ]
    nodes = [
        node(f"n{i}", *(IdleWorker(f"w{i}.{k}", k) for k in range(warm[i])), capacity=capacity)
        for i, capacity in enumerate(capacities)
    ]
    homes = {i: GroupHome(f"n{i}", "", i in alive) for i in range(len(groups)) if i < len(nodes)}
    result = assign(groups, homes, nodes)
    assert result == assign(groups, homes, nodes), "deterministic"
    if isinstance(result, Shortage):
        assert result.ranks
        room = sum(capacity // per_node for capacity in capacities)
        stay = any(home.alive for home in homes.values())
        assert stay or room < len(groups), "there was room"
        return
    assert [placed.rank for placed in result.placed] == list(range(world))
    for candidate in nodes:
        used = sum(placed.agent == candidate.agent for placed in result.placed)
        assert used <= candidate.capacity
    workers = [placed.worker for placed in result.placed if placed.worker is not None]
    assert len(workers) == len(set(workers))
    by_rank = {placed.rank: placed for placed in result.placed}
    for group in groups:
        assert len({by_rank[rank].agent for rank in group}) == 1, "a group stays together"
    for placed in result.placed:
        assert placed.worker is None or placed.worker.startswith(f"w{placed.agent[1:]}.")


def test_groups_that_exchange_most_are_not_divided_among_domains_that_could_hold_them() -> None:
    nodes = [node(f"n{i}", domain=f"switch-{i // 3}") for i in range(6)]
    groups = tuple((2 * index, 2 * index + 1) for index in range(4))

    def domains(together: int) -> list[str]:
        placed = seats(assign(groups, {}, nodes, together))
        of_agent = {candidate.agent: candidate.domain for candidate in nodes}
        return [of_agent[placed[rank][0]] for rank in range(0, 8, 2)]

    assert domains(1) == ["switch-0", "switch-0", "switch-0", "switch-1"]
    assert domains(2) == ["switch-0", "switch-0", "switch-1", "switch-1"]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), st.integers(1, 3), st.integers(1, 4))
def test_as_many_tensor_groups_as_possible_lie_within_one_domain_each(
    rooms: list[int], together: int, units: int
) -> None:
    domains = [f"d{index}" for index, room in enumerate(rooms) for _ in range(room)]
    nodes = [node(f"n{i}", domain=domain) for i, domain in enumerate(domains)]
    groups = [(2 * index, 2 * index + 1) for index in range(units * together)]
    result = assign(groups, {}, nodes, together)
    if len(nodes) < len(groups):
        assert isinstance(result, Shortage)
        return
    agents = [seats(result)[group[0]][0] for group in groups]
    found = [domains[int(agent[1:])] for agent in agents]
    whole = sum(
        len(set(found[first : first + together])) == 1 for first in range(0, len(found), together)
    )
    assert whole == min(units, sum(room // together for room in rooms))
