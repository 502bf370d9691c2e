"""Partner placement: equal to the exhaustive optimum, and every survivable eviction is survived.

The optimum is computed here independently: shard by shard over all sets of agents, as plain sets,
and the load by trying all reachable loads. Only `Cost` is shared with the tested code.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations, product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_service.placement import replica_placement
from holdfast_service.placement.durability import gaps
from holdfast_service.placement.replica_placement import Cost, Site, coordinates
from holdfast_workers.state.replicas import ReplicaEquality

AXES = ("pp", "dp_replicate", "dp_shard", "tp")
place_partners = partial(replica_placement.place_partners, equality=ReplicaEquality.PAYLOAD)
Mesh = Mapping[str, int]
Seats = Mapping[int, str]


def sites(*names: str) -> list[Site]:
    return [Site(name, f"node-{name}") for name in names]


def meshes(most: int) -> list[dict[str, int]]:
    """Every mesh of up to `most` ranks."""
    sizes = product(range(1, most + 1), repeat=len(AXES))
    return [dict(zip(AXES, shape, strict=True)) for shape in sizes if prod(shape) <= most]


def seatings(world: int, nodes: int) -> Iterator[dict[int, str]]:
    """The ranks in blocks, round-robin, and shuffled: the same number on each node."""
    per_node = world // nodes
    ranks = list(range(world))
    yield {rank: f"n{rank // per_node}" for rank in ranks}
    if 1 < nodes < world:
        yield {rank: f"n{rank % nodes}" for rank in ranks}
        random.Random(world * nodes).shuffle(ranks)
        yield {rank: f"n{index // per_node}" for index, rank in enumerate(ranks)}


# --- the optimum, found independently -----------------------------------------------------------


def states(mesh: Mesh, seats: Seats) -> list[list[int]]:
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in sorted(seats):
        at = dict(zip(mesh, coordinates(rank, mesh), strict=True))
        found.setdefault(tuple(at[a] for a in mesh if a != "dp_replicate"), []).append(rank)
    return list(found.values())


def evictions(mesh: Mesh, seats: Seats) -> list[set[str]]:
    """The agents that are lost with each group of two or more ranks."""
    found: list[set[str]] = []
    for axis in mesh:
        by_place: dict[tuple[tuple[str, int], ...], set[str]] = {}
        for rank, agent in seats.items():
            at = dict(zip(mesh, coordinates(rank, mesh), strict=True))
            rest = tuple((name, place) for name, place in at.items() if name != axis)
            by_place.setdefault(rest, set()).add(agent)
        if mesh[axis] > 1:
            found.extend(by_place.values())
    return found


def cost_of_state(
    ranks: Sequence[int],
    partners: Sequence[str],
    seats: Seats,
    evicted: Sequence[set[str]],
    domains: Mapping[str, str],
    copies: int,
) -> tuple[int, ...]:
    live = {seats[rank] for rank in ranks}
    have = live | set(partners)
    there = {domains[agent] for agent in have}
    return (
        max(0, copies - (len(live) - 1) - len(partners)),
        sum(agent not in set(seats.values()) for agent in partners),
        sum(have <= gone for gone in evicted),
        int(len(there) == 1 and "" not in there),
        len(partners),
    )


def cost_of(
    partners: Mapping[int, Sequence[str]],
    mesh: Mesh,
    seats: Seats,
    there: Sequence[Site],
    copies: int,
) -> Cost:
    evicted, domains = evictions(mesh, seats), {site.agent: site.domain for site in there}
    rows = [
        cost_of_state(
            ranks, [a for rank in ranks for a in partners[rank]], seats, evicted, domains, copies
        )
        for ranks in states(mesh, seats)
    ]
    loads = [sum(site.agent in those for those in partners.values()) for site in there]
    totals = [sum(column) for column in zip(*rows, strict=True)]
    return Cost._make([*totals, sum(load * load for load in loads)])


def best_choices(
    mesh: Mesh, seats: Seats, there: Sequence[Site], copies: int, given_up: Sequence[int] = ()
) -> tuple[tuple[int, ...], list[list[tuple[str, ...]]]]:
    """The least cost without the load, and every choice of partners with that cost, by state."""
    evicted, domains = evictions(mesh, seats), {site.agent: site.domain for site in there}
    least: list[tuple[int, ...]] = []
    choices: list[list[tuple[str, ...]]] = []
    for ranks in states(mesh, seats):
        away = [site.agent for site in there if site.agent not in {seats[r] for r in ranks}]
        costs = {}
        for some in (names for size in range(copies + 1) for names in combinations(away, size)):
            cost = cost_of_state(ranks, some, seats, evicted, domains, copies)
            costs[some] = tuple(0 if at in given_up else n for at, n in enumerate(cost))
        least.append(min(costs.values()))
        choices.append([some for some, cost in costs.items() if cost == least[-1]])
    return tuple(map(sum, zip(*least, strict=True))), choices


def no_better(found: Cost, mesh: Mesh, seats: Seats, there: Sequence[Site], copies: int) -> bool:
    """Whether no placement costs less than `found`."""
    least, choices = best_choices(mesh, seats, there, copies)
    agents = [site.agent for site in there]
    return least == found[:-1] and not reachable_loads(
        choices, agents, lambda loads, more: least_square(loads, more) < found.crowding
    )


def reachable_loads(
    choices: list[list[tuple[str, ...]]],
    agents: list[str],
    wanted: Callable[[Sequence[int], int], bool],
) -> set[tuple[int, ...]]:
    """All loads that the choices can reach through `wanted` (loads so far, remaining copies)."""
    remaining = sum(len(some[0]) for some in choices)
    reached = {(0,) * len(agents)}
    for some in choices:
        remaining -= len(some[0])
        steps = [tuple(int(agent in names) for agent in agents) for names in some]
        grown = {tuple(map(sum, zip(a, b, strict=True))) for a in reached for b in steps}
        reached = {loads for loads in grown if wanted(loads, remaining)}
    return reached


def least_square(loads: Sequence[int], more: int) -> int:
    levels = sorted(loads)
    for _ in range(more):
        levels[0] += 1
        levels.sort()
    return sum(load * load for load in levels)


# --- the tests ------------------------------------------------------------------------------------


@pytest.mark.seconds
@pytest.mark.parametrize("copies", [1, 2])
def test_placement_is_the_exhaustive_optimum_for_all_meshes_of_twelve_ranks_over_six_nodes(
    copies: int,
) -> None:
    tried = 0
    for mesh in meshes(12):
        world = prod(mesh.values())
        for nodes in (n for n in range(1, 7) if world % n == 0):
            for seats in seatings(world, nodes):
                for standbys in range(2 if nodes < 6 else 1):
                    there = sites(*(f"n{i}" for i in range(nodes + standbys)))
                    placed = place_partners(mesh, seats, there, copies=copies)
                    case = (mesh, seats, standbys, placed.partners)
                    assert cost_of(placed.partners, mesh, seats, there, copies) == placed.cost, case
                    assert no_better(placed.cost, mesh, seats, there, copies), case
                    tried += 1
    assert tried > 1000


def test_placement_is_the_exhaustive_optimum_where_nodes_have_domains() -> None:
    draw = random.Random(5)
    chosen = [mesh for mesh in meshes(12) if prod(mesh.values()) >= 4]
    given_up = 0
    for mesh in draw.choices(chosen, k=120):
        world = prod(mesh.values())
        nodes = draw.choice([n for n in range(2, 7) if world % n == 0] or [1])
        seats = draw.choice(list(seatings(world, nodes)))
        names = [f"n{i}" for i in range(nodes + draw.randint(0, 6 - nodes))]
        there = [Site(name, f"x-{name}", draw.choice(["a", "b", "b", ""])) for name in names]
        for copies in (1, 2, 3):
            placed = place_partners(mesh, seats, there, copies=copies)
            case = (mesh, seats, there, copies, placed.partners)
            assert cost_of(placed.partners, mesh, seats, there, copies) == placed.cost, case
            if not placed.crosses_domains:
                given_up += 1
                least, _ = best_choices(mesh, seats, there, copies, given_up=[3])
                assert least == placed.cost._replace(one_domain=0)[:-1], case
                _, choices = best_choices(mesh, seats, there, copies)
                room = 2 * copies * (world // nodes)

                def within(loads: Sequence[int], _: int, room: int = room) -> bool:
                    return max(loads) <= room

                fits = reachable_loads(choices, names, within)
                assert copies > 1 or not fits, case
            else:
                assert no_better(placed.cost, mesh, seats, there, copies), case
    assert given_up < 60


def test_the_optimum_shard_by_shard_equals_the_joint_optimum() -> None:
    """The optimum above relies on this."""
    for mesh in meshes(4):
        seats = {rank: f"n{rank}" for rank in range(prod(mesh.values()))}
        there = sites(*(f"n{i}" for i in range(len(seats) + 1)))
        ways = [
            [some for size in range(2) for some in combinations([s.agent for s in there], size)]
            for _ in seats
        ]
        best = min(
            cost_of(dict(enumerate(choice)), mesh, seats, there, 1)
            for choice in product(*ways)
            if all(
                not ({seats[rank] for rank in alike} & {a for rank in alike for a in choice[rank]})
                and sum(len(choice[rank]) for rank in alike) <= 1
                for alike in states(mesh, seats)
            )
        )
        assert place_partners(mesh, seats, there).cost == best, mesh


def test_every_eviction_is_survived_wherever_a_legal_placement_exists() -> None:
    """Where none exists, the plan names the groups and the reason. Legal: at most one copy of a
    state, not on a machine that has it live."""
    impossible = 0
    for mesh in meshes(12):
        world = prod(mesh.values())
        for nodes in (n for n in range(1, 7) if world % n == 0):
            for seats in seatings(world, nodes):
                there = sites(*(f"n{i}" for i in range(nodes)))
                placed = place_partners(mesh, seats, there)
                exposed = 0
                for ranks in states(mesh, seats):
                    live = {seats[rank] for rank in ranks}
                    have = live | {a for rank in ranks for a in placed.partners[rank]}
                    for gone in evictions(mesh, seats):
                        if have <= gone:
                            exposed += 1
                assert placed.cost.exposed == exposed
                texts = [gap.text for gap in gaps(placed) if gap.what.startswith("evicting")]
                assert bool(texts) == bool(exposed)
                assert all("no legal placement" in text for text in texts), texts
                impossible += bool(exposed)
                if exposed:
                    assert not_to_be_had(mesh, seats, [site.agent for site in there])
    assert impossible > 50


def not_to_be_had(mesh: Mesh, seats: Seats, agents: Sequence[str]) -> bool:
    """Whether some state is lost in some eviction wherever its only copy is placed."""
    evicted = evictions(mesh, seats)
    for ranks in states(mesh, seats):
        live = {seats[rank] for rank in ranks}
        choices = [live, *(live | {agent} for agent in agents if agent not in live)]
        if all(any(have <= gone for gone in evicted) for have in choices):
            return True
    return False


def test_partners_differ_in_two_coordinates_where_the_mesh_allows() -> None:
    seats = {rank: f"n{rank}" for rank in range(4)}
    placed = place_partners({"dp_shard": 2, "tp": 2}, seats, sites("n0", "n1", "n2", "n3"))
    assert placed.partners == {0: ("n3",), 1: ("n2",), 2: ("n1",), 3: ("n0",)}


def test_live_replicas_need_a_copy_only_against_the_eviction_of_all_of_them() -> None:
    mesh = {"dp_replicate": 2, "tp": 2}
    two_nodes = {0: "n0", 1: "n0", 2: "n1", 3: "n1"}
    placed = place_partners(mesh, two_nodes, sites("n0", "n1", "n2"))
    assert placed.partners == dict.fromkeys(range(4), ())
    assert placed.cost.missing == 0
    four_nodes = {rank: f"n{rank}" for rank in range(4)}
    spread = place_partners(mesh, four_nodes, sites("n0", "n1", "n2", "n3"))
    assert (spread.cost.made, spread.cost.exposed) == (2, 0)
    together = place_partners(mesh, dict.fromkeys(range(4), "n0"), sites("n0", "n1"))
    assert together.cost.made == 2


@pytest.mark.parametrize("equality", [ReplicaEquality.NOTHING, ReplicaEquality.SHARED])
def test_replicas_that_are_not_equal_have_partners_like_any_other_ranks(
    equality: ReplicaEquality,
) -> None:
    seats = {rank: f"n{rank}" for rank in range(4)}
    for mesh, like in (
        ({"dp_replicate": 2, "tp": 2}, {"dp_shard": 2, "tp": 2}),
        ({"dp_replicate": 4}, {"dp_shard": 4}),
    ):
        placed = place_partners(mesh, seats, sites(*seats.values()), equality=equality)
        as_shards = place_partners(like, seats, sites(*seats.values()))
        assert placed.partners == as_shards.partners
        assert placed.cost == as_shards.cost
        assert all(placed.partners.values())


def test_two_agents_are_partners_of_each_other_and_the_standby_gets_no_copy() -> None:
    seats = {0: "n0", 1: "n0", 2: "n1", 3: "n1"}
    placed = place_partners({"dp_shard": 2, "tp": 2}, seats, sites("n0", "n1", "n2"))
    assert placed.partners == {0: ("n1",), 1: ("n1",), 2: ("n0",), 3: ("n0",)}


def test_a_standby_is_a_partner_only_of_the_only_agent_with_ranks() -> None:
    seats = {0: "n0", 1: "n0"}
    placed = place_partners({"tp": 2}, seats, sites("n0", "n1"))
    assert placed.partners == {0: ("n1",), 1: ("n1",)}
    assert place_partners({"tp": 2}, seats, sites("n0")).partners == {0: (), 1: ()}


def test_zero_copies_have_no_partners() -> None:
    seats = {rank: f"n{rank}" for rank in range(4)}
    placed = place_partners({"dp_shard": 4}, seats, sites("n0", "n1", "n2", "n3"), copies=0)
    assert placed.partners == dict.fromkeys(range(4), ())


def test_a_copy_that_a_partner_already_holds_is_not_moved() -> None:
    seats = {0: "n0", 1: "n1", 2: "n2"}
    there = sites("n0", "n1", "n2")
    placed = place_partners({"dp_shard": 3}, seats, there, keep={0: ("n2",), 1: ("n2",)})
    assert placed.partners == {0: ("n2",), 1: ("n2",), 2: ("n0",)}
    more = place_partners({"dp_shard": 3}, seats, there, copies=2, keep={0: ("n2",)})
    assert more.partners[0] == ("n1", "n2")


def test_a_failed_link_is_avoided() -> None:
    seats = {0: "n0", 1: "n1"}
    avoid = frozenset({("n0", "n1")})
    placed = place_partners({"tp": 2}, seats, sites("n0", "n1", "n2"), avoid=avoid)
    assert placed.partners[0] == ("n2",)


def test_several_agents_on_a_node_count_as_one_machine() -> None:
    there = [Site("n0", "x"), Site("n1", "x"), Site("n2", "y")]
    placed = place_partners({"tp": 2}, {0: "n0", 1: "n1"}, there)
    assert placed.partners == {0: ("n2",), 1: ("n2",)}


@pytest.mark.parametrize("per_node", [1, 8])
def test_the_time_to_place_ranks_grows_with_their_number_not_its_square(per_node: int) -> None:
    def shortest_s(pp: int) -> float:
        mesh = {"pp": pp, "dp_replicate": 2, "dp_shard": 8, "tp": 8}
        ranks = 128 * pp
        seats = {rank: f"n{rank // per_node}" for rank in range(ranks)}
        there = sites(*(f"n{i}" for i in range(ranks // per_node + 2)))
        times = []
        for _ in range(5):
            began = time.thread_time()
            placed = place_partners(mesh, seats, there)
            times.append(time.thread_time() - began)
            assert placed.cost.exposed == 0
        return min(times)

    assert shortest_s(16) < 64 * shortest_s(1)  # 16 times as many ranks


@given(
    count=st.integers(1, 8),
    standbys=st.integers(0, 3),
    per_node=st.integers(1, 2),
    domains=st.integers(1, 3),
    copies=st.integers(1, 3),
)
def test_ranks_get_as_many_partners_as_possible_and_never_their_own_node(
    count: int, standbys: int, per_node: int, domains: int, copies: int
) -> None:
    everyone = [Site(f"n{i}", f"x{i}", f"d{i % domains}") for i in range(count + standbys)]
    seats = {rank: f"n{rank // per_node}" for rank in range(count * per_node)}
    mesh = {"dp_shard": count, "tp": per_node}
    placed = place_partners(mesh, seats, everyone, copies=copies)
    for rank, partners in placed.partners.items():
        assert len(set(partners)) == len(partners) == min(copies, len(everyone) - 1)
        assert seats[rank] not in partners
    again = place_partners(mesh, seats, list(reversed(everyone)), copies=copies)
    assert placed.partners == again.partners
