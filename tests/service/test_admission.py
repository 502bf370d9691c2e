"""Who may start: the pure count of what is free."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast_service.admission import Demand, reason_to_wait
from holdfast_service.reports import Capacity, NodeCapacity


def nodes(*cpus: float) -> Capacity:
    return Capacity(
        nodes=tuple(NodeCapacity(f"n{n}", "h", free, 0.0) for n, free in enumerate(cpus)),
        can_grow=False,
    )


ONE_EACH = Demand(nodes=3, cpus=1.0, gpus=0.0)


def test_a_job_starts_when_it_fits() -> None:
    assert reason_to_wait(nodes(1, 1, 1), [], [], ONE_EACH) is None


def test_bundles_of_one_job_lie_on_different_nodes() -> None:
    assert reason_to_wait(nodes(9, 9), [], [], ONE_EACH)


def test_what_others_hold_is_not_free() -> None:
    reason = reason_to_wait(nodes(1, 1, 1), [Demand(1, 0.5, 0)], [], ONE_EACH)
    assert reason is not None
    assert "2 of 3 nodes" in reason


def test_an_older_job_keeps_its_turn_where_it_fits() -> None:
    small = Demand(1, 1.0, 0)
    assert reason_to_wait(nodes(1, 1, 1), [], [ONE_EACH], small)
    # ... and lets others pass where it does not.
    assert reason_to_wait(nodes(1, 1), [], [ONE_EACH], small) is None


def test_tenths_of_a_cpu_add_up() -> None:
    held = [Demand(1, 0.1, 0)] * 9
    assert reason_to_wait(nodes(1), held, [], Demand(1, 0.1, 0)) is None


def test_a_cluster_that_grows_is_asked_at_once() -> None:
    assert reason_to_wait(Capacity((), can_grow=True), [], [], ONE_EACH) is None


demands = st.builds(
    Demand, st.integers(1, 4), st.sampled_from([0.1, 0.5, 1.0]), st.sampled_from([0.0, 1.0])
)


@given(st.lists(st.sampled_from([0.5, 1.0, 2.0]), max_size=5), st.lists(demands, max_size=12))
def test_what_is_admitted_one_after_another_fits_together(
    cpus: list[float], wanted: list[Demand]
) -> None:
    capacity = nodes(*cpus)
    held: list[Demand] = []
    for demand in wanted:
        if reason_to_wait(capacity, held, [], demand) is None:
            held.append(demand)
    assert sum(demand.nodes * demand.cpus for demand in held) <= sum(cpus) + 1e-6
    assert not any(demand.gpus for demand in held)
