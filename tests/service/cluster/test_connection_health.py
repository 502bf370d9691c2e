"""When a connection to Ray is kept, and when it is made anew."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from holdfast_service.cluster.connection_health import Link, LinkHealth, Patience, Sight, judge

PATIENCE = Patience(lost_after_s=6.0, lost_after_looks=3)
WELL = Sight(0.0, answers=True, raylet=True, head=True)
AWAY = Sight(0.0, answers=False, head=False)
DEAF = Sight(0.0, answers=False, head=True)

sights = st.one_of(
    st.just(WELL),
    st.just(AWAY),
    st.just(DEAF),
    st.just(replace(WELL, raylet=None)),
)
pauses = st.floats(0.5, 5.0)


def after(*looks: tuple[float, Sight]) -> list[LinkHealth]:
    found, at = [LinkHealth()], 0.0
    for pause, sight in looks:
        at += pause
        found.append(judge(found[-1], replace(sight, at=at), PATIENCE))
    return found


@given(st.lists(st.tuples(pauses, st.sampled_from([WELL, AWAY])), max_size=60))
def test_a_head_that_is_away_for_any_time_costs_no_connection(
    looks: list[tuple[float, Sight]],
) -> None:
    assert all(health.link is not Link.LOST for health in after(*looks))


@given(st.lists(st.tuples(pauses, sights), max_size=60))
def test_an_answer_to_this_connection_makes_it_ready_unless_it_is_lost(
    looks: list[tuple[float, Sight]],
) -> None:
    *_, last = after(*looks)
    again = judge(last, replace(WELL, at=1e6), PATIENCE)
    assert again == (last if last.link is Link.LOST else LinkHealth())


@given(st.lists(st.tuples(pauses, sights), max_size=60))
def test_a_connection_is_lost_only_after_enough_failed_looks_in_a_row(
    looks: list[tuple[float, Sight]],
) -> None:
    states = after(*looks)
    lost = next((i for i, health in enumerate(states) if health.link is Link.LOST), None)
    if lost is not None:
        row = looks[lost - PATIENCE.lost_after_looks : lost]
        assert len(row) == PATIENCE.lost_after_looks
        assert all(sight.head and not (sight.answers and sight.raylet) for _, sight in row)


@given(st.lists(st.tuples(pauses, st.just(DEAF)), min_size=14, max_size=20))
def test_a_connection_that_alone_gets_no_answer_is_lost_in_the_end(
    looks: list[tuple[float, Sight]],
) -> None:
    assert after(*looks)[-1].link is Link.LOST


@given(st.lists(st.tuples(pauses, sights), max_size=20), st.booleans())
def test_a_dead_raylet_and_another_cluster_are_final_at_once(
    looks: list[tuple[float, Sight]], dead: bool
) -> None:
    final = replace(WELL, raylet=False) if dead else replace(DEAF, same_cluster=False)
    health = after(*looks, (1.0, final))[-1]
    assert health.link is Link.LOST
    assert health.why


def test_the_reason_says_what_is_missing_and_for_how_long() -> None:
    health = after((1.0, AWAY), (4.0, AWAY))[-1]
    assert health.link is Link.HEAD_AWAY
    assert "GCS" in health.why and "for 4 s" in health.why and "train on" in health.why
