"""The rules of quarantine and cordon: which nodes are set aside, and for how long."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_service.policy.causes import Cause
from holdfast_service.policy.quarantine import (
    COUNTED_CAUSES,
    NodeDecision,
    NodeIncident,
    NodeStanding,
    QuarantineRules,
    cordoned,
    decide_quarantine,
    node_name,
    quarantined,
    standing_at,
    uncordoned,
)

RULES = QuarantineRules()


def incidents(*at: float, cause: Cause = Cause.NODE_LOST) -> list[NodeIncident]:
    return [NodeIncident("j", number, cause, when) for number, when in enumerate(at)]


def test_several_incidents_within_the_window_quarantine_a_node_with_a_reason_and_an_end() -> None:
    assert decide_quarantine(NodeDecision(), incidents(1000, 1100), RULES, 1200.0) is None
    new = decide_quarantine(NodeDecision(), incidents(1000, 1100, 1200), RULES, 1200.0)
    assert new is not None and new.state is NodeStanding.QUARANTINED
    assert new.until == 1200 + RULES.first_s
    assert "3 incidents within 3600 s" in new.reason and "node_lost (job j" in new.reason


def test_old_incidents_and_incidents_that_do_not_blame_the_node_do_not_count() -> None:
    now = 10_000.0
    assert (
        decide_quarantine(NodeDecision(), incidents(now - 3601, now - 1, now), RULES, now) is None
    )
    assert not COUNTED_CAUSES & {Cause.OUT_OF_MEMORY, Cause.WORKER_CRASH, Cause.PREEMPTED}
    for cause in set(Cause) - COUNTED_CAUSES:
        assert (
            decide_quarantine(NodeDecision(), incidents(1, 2, 3, cause=cause), RULES, 4.0) is None
        )


def test_a_limit_of_zero_incidents_disables_quarantine() -> None:
    off = QuarantineRules(incidents=0)
    assert decide_quarantine(NodeDecision(), incidents(1, 2, 3), off, 4.0) is None
    assert not off.leaves_enough(0, 100)


@pytest.mark.parametrize(
    ("aside", "there", "enough"), [(0, 2, False), (0, 3, True), (1, 3, False), (1, 6, True)]
)
def test_at_most_a_share_of_the_nodes_is_quarantined(aside: int, there: int, enough: bool) -> None:
    assert RULES.leaves_enough(aside, there) is enough


def test_each_further_quarantine_is_twice_as_long_until_a_node_was_healthy_for_long() -> None:
    now, standing = 1e6, NodeDecision()
    lengths = []
    for _ in range(10):
        standing = quarantined(standing, "again", RULES, now)
        assert standing.until is not None
        lengths.append(standing.until - now)
        now = standing.until + 1
    assert lengths[:4] == [600, 1200, 2400, 4800]
    assert lengths[-1] == RULES.longest_s
    assert standing.until is not None
    later = quarantined(standing, "at last", RULES, standing.until + 2 * RULES.forget_s)
    assert later.strikes == 1


def test_a_lifted_quarantine_resets_the_incident_count() -> None:
    history = incidents(1000, 1100, 1200)
    standing = decide_quarantine(NodeDecision(), history, RULES, 1200.0)
    assert standing is not None
    free = uncordoned(standing, 1300.0)
    assert standing_at(free, 1300.0) is NodeStanding.READY
    assert decide_quarantine(free, [*history, *incidents(1400, 1500)], RULES, 1500.0) is None
    again = decide_quarantine(free, [*history, *incidents(1400, 1500, 1600)], RULES, 1600.0)
    assert again is not None and again.strikes == 2


def test_a_cordon_lasts_until_its_end_or_without_limit() -> None:
    for_ever = cordoned(NodeDecision(), "repair", None, 10.0)
    assert standing_at(for_ever, 1e12) is NodeStanding.CORDONED
    assert decide_quarantine(for_ever, incidents(11, 12, 13), RULES, 14.0) is None
    a_while = cordoned(NodeDecision(), "repair", 20.0, 10.0)
    assert standing_at(a_while, 19.9) is NodeStanding.CORDONED
    assert standing_at(a_while, 20.0) is NodeStanding.READY


def test_a_node_is_named_by_its_address_and_on_loopback_by_its_ray_node_id() -> None:
    assert node_name("abc", "10.0.0.7") == "10.0.0.7"
    assert node_name("abc", "fd00::7") == "fd00::7"
    assert node_name("abc", "node-7.cluster") == "node-7.cluster"
    for shared in ("127.0.0.1", "127.0.0.3", "::1", "localhost", ""):
        assert node_name("abc", shared) == "abc"


@given(
    st.lists(st.tuples(st.floats(0, 1e5), st.sampled_from(list(Cause))), max_size=20),
    st.floats(0, 1e5),
    st.integers(1, 5),
    st.sampled_from(list(NodeStanding)),
    st.none() | st.floats(0, 2e5),
)
def test_a_node_is_quarantined_exactly_when_enough_counted_incidents_are_recent(
    events: list[tuple[float, Cause]],
    now: float,
    limit: int,
    state: NodeStanding,
    until: float | None,
) -> None:
    rules = QuarantineRules(incidents=limit)
    before = NodeDecision(state, "", 100.0, until, 1)
    history = [NodeIncident("j", n, cause, at) for n, (at, cause) in enumerate(events)]
    counted = [
        at
        for at, cause in events
        if cause in COUNTED_CAUSES and at > max(now - rules.window_s, before.since)
    ]
    new = decide_quarantine(before, history, rules, now)
    ready = state is NodeStanding.READY or (until is not None and until <= now)
    assert (new is not None) == (ready and len(counted) >= limit)
    if new is not None:
        assert new.until is not None and now < new.until <= now + rules.longest_s
        assert standing_at(new, now) is NodeStanding.QUARANTINED
        assert decide_quarantine(new, history, rules, now) is None
