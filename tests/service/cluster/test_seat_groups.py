"""The plan of an elastic job's placement groups, against a table that changes at random."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast_service.cluster.seat_groups import PENDING, PLACED, SeatGroup, plan_groups

SEATS = ("n0", "n1", "n2")
NODES = ("a", "b", "c", "d")
NOBODY: frozenset[str] = frozenset()


def test_one_group_is_asked_for_at_a_time_off_the_other_seats() -> None:
    placed = SeatGroup("n0", "g0", PLACED, "a")
    plan = plan_groups(SEATS, [placed], frozenset("abc"), frozenset("d"), {})
    assert (plan.ask_for, plan.off, plan.remove) == ("n1", frozenset("ad"), ())
    pending = SeatGroup("n1", "g1", PENDING)
    plan = plan_groups(
        SEATS, [placed, pending], frozenset("abc"), frozenset("d"), {"n1": frozenset("ad")}
    )
    assert (plan.ask_for, plan.remove) == (None, ())


def test_a_group_without_its_node_is_removed_and_then_asked_for_anew() -> None:
    groups = [SeatGroup("n0", "g0", PLACED, "a"), SeatGroup("n1", "g1", "RESCHEDULING")]
    assert plan_groups(SEATS, groups, frozenset("ab"), NOBODY, {}).remove == (groups[1],)
    dead = [SeatGroup("n0", "g0", PLACED, "a")]
    assert plan_groups(SEATS, dead, frozenset("b"), NOBODY, {}).remove == (dead[0],)
    assert plan_groups(SEATS, [], frozenset("b"), NOBODY, {}).ask_for == "n0"


def test_two_seats_on_one_node_leave_one() -> None:
    groups = [SeatGroup("n0", "g0", PLACED, "a"), SeatGroup("n2", "g2", PLACED, "a")]
    assert plan_groups(SEATS, groups, frozenset("a"), NOBODY, {}).remove == (groups[1],)


def test_a_pending_group_is_made_anew_when_the_other_seats_have_moved() -> None:
    pending = SeatGroup("n1", "g1", PENDING)
    placed = SeatGroup("n0", "g0", PLACED, "b")
    asked = {"n1": frozenset("a")}
    assert plan_groups(SEATS, [placed, pending], frozenset("ab"), NOBODY, asked).remove == (
        pending,
    )


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(("kill", "start", "place")), st.sampled_from(NODES)), max_size=60
    )
)
@settings(max_examples=300)
def test_seats_never_share_a_node_and_every_free_node_is_used_in_the_end(
    steps: list[tuple[str, str]],
) -> None:
    alive: set[str] = set(NODES)
    groups: dict[str, SeatGroup] = {}
    asked: dict[str, frozenset[str]] = {}
    calm = [("start", node) for node in NODES] + [("place", "a")] * 20
    for at, (what, node) in enumerate([*steps, *calm]):
        if what == "kill":
            alive.discard(node)
            for seat, group in groups.items():
                if group.node == node:
                    groups[seat] = SeatGroup(seat, group.group_id, "RESCHEDULING")
        elif what == "start":
            alive.add(node)
        for seat, group in groups.items():
            room = sorted(alive - asked.get(seat, NOBODY))
            if what == "place" and group.state == PENDING and room:
                groups[seat] = SeatGroup(seat, group.group_id, PLACED, room[0])
        plan = plan_groups(SEATS, [*groups.values()], frozenset(alive), NOBODY, asked)
        for group in plan.remove:
            del groups[group.seat]
            asked.pop(group.seat, None)
        if plan.ask_for is not None:
            assert plan.ask_for not in groups
            groups[plan.ask_for] = SeatGroup(plan.ask_for, str(at), PENDING)
            asked[plan.ask_for] = plan.off
        assert sum(group.state == PENDING for group in groups.values()) <= 1
        used = [group.node for group in groups.values() if group.state == PLACED]
        assert len(used) == len(set(used))
    assert {group.seat for group in groups.values() if group.state == PLACED} == set(SEATS)
