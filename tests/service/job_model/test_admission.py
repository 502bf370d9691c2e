"""Admission of queued jobs: the pure count of free resources."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast_service.job_model.admission import (
    Admission,
    NodeDemand,
    admit,
    reason_to_wait,
    usable,
)
from holdfast_service.job_model.supervisor_protocol import Capacity, NodeCapacity
from holdfast_service.policy.quarantine import Avoided, NodeStanding


def nodes(*cpus: float) -> Capacity:
    return Capacity(
        nodes=tuple(NodeCapacity(f"n{n}", "h", free, 0.0) for n, free in enumerate(cpus)),
        can_grow=False,
    )


ONE_EACH = NodeDemand(nodes=3, cpus=1.0, gpus=0.0)


def test_a_job_starts_when_it_fits() -> None:
    assert reason_to_wait(nodes(1, 1, 1), [], [], ONE_EACH) is None


def test_an_elastic_job_starts_with_its_fewest_nodes_and_holds_up_to_its_most() -> None:
    elastic = NodeDemand(nodes=4, cpus=1.0, gpus=0.0, least=2)
    assert reason_to_wait(nodes(1, 1), [], [], elastic) is None
    reason = reason_to_wait(nodes(1), [], [], elastic)
    assert reason is not None and reason.startswith("2 nodes with 1 CPUs")
    assert reason_to_wait(nodes(1, 1, 1), [], [elastic], NodeDemand(1, 1, 0)) is None
    assert reason_to_wait(nodes(1, 1, 1), [elastic], [], NodeDemand(1, 1, 0))


def test_bundles_of_one_job_need_different_nodes() -> None:
    assert reason_to_wait(nodes(9, 9), [], [], ONE_EACH)


def test_resources_of_started_jobs_are_not_free() -> None:
    reason = reason_to_wait(nodes(1, 1, 1), [NodeDemand(1, 0.5, 0)], [], ONE_EACH)
    assert reason is not None
    assert "2 of 3 nodes" in reason


def test_an_older_queued_job_that_fits_goes_first() -> None:
    small = NodeDemand(1, 1.0, 0)
    assert reason_to_wait(nodes(1, 1, 1), [], [ONE_EACH], small)
    # ... and lets others pass where it does not.
    assert reason_to_wait(nodes(1, 1), [], [ONE_EACH], small) is None


def test_tenths_of_a_cpu_add_up_to_a_whole_node() -> None:
    held = [NodeDemand(1, 0.1, 0)] * 9
    assert reason_to_wait(nodes(1), held, [], NodeDemand(1, 0.1, 0)) is None


def test_a_cluster_that_can_grow_admits_at_once() -> None:
    assert reason_to_wait(Capacity((), can_grow=True), [], [], ONE_EACH) is None


def aside(standing: NodeStanding, *names: str) -> dict[str, Avoided]:
    return {name: Avoided(standing, f"{standing}: of late") for name in names}


def on_machines(*hosts: str) -> Capacity:
    found = tuple(NodeCapacity(f"r{n}", host, 1.0, 0.0) for n, host in enumerate(hosts))
    return Capacity(found, can_grow=False)


def test_quarantined_nodes_are_used_with_a_reason_if_the_others_are_too_few() -> None:
    four = on_machines("10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4")
    quarantined = aside(NodeStanding.QUARANTINED, "10.0.0.2")
    assert admit(four, quarantined, [], [], ONE_EACH) == Admission(True)
    admission = admit(four, quarantined, [NodeDemand(1, 1.0, 0.0)], [], ONE_EACH)
    assert admission.may_start
    assert admission.why == (
        "nodes in quarantine are used, because 3 nodes with 1 CPUs and 0 GPUs free are needed, 2 "
        "of 3 nodes have them; 1 more are set aside: 10.0.0.2 (quarantined: of late)"
    )


def test_cordoned_nodes_are_not_used_and_the_reason_to_wait_names_them() -> None:
    four = on_machines("10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4")
    cordoned = aside(NodeStanding.CORDONED, "10.0.0.1", "10.0.0.9")
    assert admit(four, cordoned, [], [], ONE_EACH) == Admission(True)
    both = cordoned | aside(NodeStanding.QUARANTINED, "10.0.0.2")
    assert admit(four, both, [], [], ONE_EACH).may_start
    admission = admit(four, both | aside(NodeStanding.CORDONED, "10.0.0.3"), [], [], ONE_EACH)
    assert not admission.may_start
    assert admission.why.endswith(
        "2 of 2 nodes have them; 2 more are set aside: 10.0.0.1 (cordoned: of late), 10.0.0.3 "
        "(cordoned: of late)"
    )


def test_a_long_list_of_set_aside_nodes_is_truncated() -> None:
    many = on_machines(*(f"10.0.0.{n}" for n in range(9)))
    cordoned = aside(NodeStanding.CORDONED, *(f"10.0.0.{n}" for n in range(7)))
    assert admit(many, cordoned, [], [], ONE_EACH).why.endswith(
        "10.0.0.3 (cordoned: of late), 3 others"
    )


def test_all_nodes_of_a_machine_are_set_aside_with_it() -> None:
    two_on_one = on_machines("10.0.0.1", "10.0.0.1", "10.0.0.2")
    assert len(usable(two_on_one, {}).nodes) == 3
    left = usable(two_on_one, aside(NodeStanding.CORDONED, "10.0.0.1"))
    assert ([node.host for node in left.nodes], len(left.set_aside)) == (["10.0.0.2"], 1)


demands = st.builds(
    NodeDemand, st.integers(1, 4), st.sampled_from([0.1, 0.5, 1.0]), st.sampled_from([0.0, 1.0])
)


@given(st.lists(st.sampled_from([0.5, 1.0, 2.0]), max_size=5), st.lists(demands, max_size=12))
def test_jobs_admitted_one_after_another_fit_together(
    cpus: list[float], wanted: list[NodeDemand]
) -> None:
    capacity = nodes(*cpus)
    held: list[NodeDemand] = []
    for demand in wanted:
        if reason_to_wait(capacity, held, [], demand) is None:
            held.append(demand)
    assert sum(demand.nodes * demand.cpus for demand in held) <= sum(cpus) + 1e-6
    assert not any(demand.gpus for demand in held)
