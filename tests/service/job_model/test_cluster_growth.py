"""What an autoscaled cluster is asked for: by the queue's order, within the bounds, no more."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from holdfast_service.job_model.admission import Claim, NodeDemand, admit
from holdfast_service.job_model.cluster_growth import (
    ClusterSize,
    GrowthBounds,
    GrowthPlan,
    plan_growth,
)
from holdfast_service.job_model.node_labels import rules_of
from holdfast_service.job_model.supervisor_protocol import Capacity, NodeCapacity
from holdfast_service.policy.quarantine import Avoided, NodeStanding

NO_BOUNDS = GrowthBounds()
HEAD = NodeCapacity("head", "h", 0.0, 0.0)


def cluster(*cpus: float, **placed: tuple[str, ...]) -> Capacity:
    """Nodes `n0`, `n1`, ..., and a head without CPUs."""
    nodes = tuple(NodeCapacity(f"n{n}", f"10.0.0.{n}", free, 0.0) for n, free in enumerate(cpus))
    return Capacity((HEAD, *nodes), can_grow=True, placed=placed)


def queued(*demands: NodeDemand, overdue: int = 0) -> list[Claim]:
    return [Claim(f"q{n}", demand, overdue=overdue) for n, demand in enumerate(demands)]


def plan(
    capacity: Capacity,
    queue: list[Claim],
    bounds: GrowthBounds = NO_BOUNDS,
    held: tuple[Claim, ...] = (),
    growing: tuple[Claim, ...] = (),
) -> GrowthPlan:
    return plan_growth(capacity, {}, held, queue, growing, bounds)


def test_a_job_is_asked_for_with_the_nodes_that_it_could_have_and_new_ones() -> None:
    found = plan(cluster(8, 2), queued(NodeDemand(3, 4.0, 0.0)))
    request = found.requests["q0"]
    assert (request.nodes, request.new, request.bundle) == (3, 2, {"CPU": 4.0})
    assert request.off == (), "n1 is too small anyway"
    assert found.note("q0").endswith("it was asked for 2 more nodes with 4 CPUs and 0 GPUs")
    assert found.size == ClusterSize(4, 18.0, 0.0)


def test_nothing_is_asked_for_a_job_that_fits() -> None:
    found = plan(cluster(4, 4), queued(NodeDemand(2, 4.0, 0.0)))
    assert not found.requests and not found.refused and not found.note("q0")
    assert found.may_start == {"q0"}


def test_the_group_is_kept_off_nodes_that_others_have() -> None:
    held = (Claim("running", NodeDemand(1, 4.0, 0.0)),)
    capacity = cluster(4, 4, running=("n0",))
    first, second = queued(NodeDemand(2, 4.0, 0.0), NodeDemand(2, 4.0, 0.0))
    requests = plan(capacity, [first, second], held=held).requests
    assert (requests["q0"].new, requests["q0"].off) == (1, ("n0",))
    assert (requests["q1"].new, requests["q1"].off) == (2, ("n0", "n1")), "n1 is for the first"


def test_a_job_that_may_pass_a_larger_one_is_not_asked_for() -> None:
    first, second = queued(NodeDemand(2, 4.0, 0.0), NodeDemand(1, 4.0, 0.0))
    requests = plan(cluster(4), [first, second]).requests
    assert requests.keys() == {"q0"} and requests["q0"].new == 2, "the second takes the node"
    overdue = replace(first, overdue=1)
    requests = plan(cluster(4, 4), [replace(overdue, demand=NodeDemand(3, 4, 0)), second]).requests
    assert requests.keys() == {"q0"}, "too few are large enough: none are reserved"
    held = (Claim("running", NodeDemand(1, 4.0, 0.0)),)
    requests = plan(cluster(4, 4, running=("n0",)), [overdue, second], held=held).requests
    assert (requests["q0"].new, requests["q1"].new) == (1, 1), "both nodes are reserved"


def test_cordoned_and_unsuitable_nodes_do_not_count() -> None:
    (claim,) = queued(NodeDemand(1, 4.0, 0.0))
    unsuited = replace(claim, unusable={"10.0.0.0": Avoided(NodeStanding.CORDONED, "too small")})
    assert plan(cluster(4), [unsuited]).requests["q0"].off == ("n0",)
    aside = {"10.0.0.0": Avoided(NodeStanding.CORDONED, "new cables")}
    found = plan_growth(cluster(4), aside, (), [claim], (), NO_BOUNDS)
    assert found.requests["q0"].off == ("n0",)
    aside = {"10.0.0.0": Avoided(NodeStanding.QUARANTINED, "3 incidents")}
    assert not plan_growth(cluster(4), aside, (), [claim], (), NO_BOUNDS).requests, "it may start"


def test_labels_and_other_resources_are_asked_for_too() -> None:
    labels = rules_of({"disk": ["nvme"]})
    demand = NodeDemand(1, 2.0, 1.0, custom=(("fpga", 2.0),), labels=labels)
    request = plan(cluster(4), queued(demand)).requests["q0"]
    assert request.bundle == {"CPU": 2.0, "GPU": 1.0, "fpga": 2.0}
    assert (request.labels, request.off) == ({"disk": "nvme"}, ())
    assert request.what == "1 more node with 2 CPUs, 1 GPU and 2 fpga, labelled disk=nvme"


def test_a_bound_refuses_a_job_with_the_setting_and_a_smaller_one_is_asked_for() -> None:
    large, small = queued(NodeDemand(3, 4.0, 0.0), NodeDemand(1, 4.0, 0.0))
    found = plan(cluster(2), [large, small], GrowthBounds(nodes=3))
    assert found.refused == {"q0": "it would have 4 nodes, and HOLDFAST_AUTOSCALE_NODES allows 3"}
    assert found.note("q0").startswith("; the cluster does not grow for it: it would have 4")
    assert found.requests.keys() == {"q1"}
    found = plan(cluster(2), [large], GrowthBounds(cpus=12.0, gpus=0.0))
    assert found.refused["q0"] == "it would have 14 CPUs, and HOLDFAST_AUTOSCALE_CPUS allows 12"


def test_a_bound_below_the_present_size_refuses_only_what_would_add_to_it() -> None:
    gpus = Capacity((NodeCapacity("n0", "h", 4.0, 8.0, foreign_cpus=4.0),), can_grow=True)
    on_cpus, on_gpus = NodeDemand(1, 2.0, 0.0), NodeDemand(1, 2.0, 1.0)
    found = plan(gpus, queued(on_cpus, on_gpus), GrowthBounds(gpus=4.0))
    assert found.requests.keys() == {"q0"} and found.refused.keys() == {"q1"}


def test_nodes_that_a_started_job_lacks_count_towards_the_bound() -> None:
    held = (Claim("lost-one", NodeDemand(2, 4.0, 0.0)),)
    capacity = cluster(4, **{"lost-one": ("n0",)})
    assert plan(capacity, queued(NodeDemand(1, 4.0, 0.0)), GrowthBounds(nodes=2), held).refused
    assert plan(capacity, queued(NodeDemand(1, 4.0, 0.0)), GrowthBounds(nodes=3), held).requests


def test_an_elastic_job_takes_a_free_node_or_one_within_the_bounds() -> None:
    demand = NodeDemand(4, 4.0, 0.0, least=1)
    first, second = Claim("e0", demand), Claim("e1", demand)

    def held_back(capacity: Capacity, bounds: GrowthBounds, *queue: NodeDemand) -> frozenset[str]:
        capacity = replace(capacity, placed={"e0": ("n0",), "e1": ("n1",)})
        both = (first, second)
        return plan(capacity, queued(*queue), bounds, both, both).held_back

    assert held_back(cluster(4, 4), NO_BOUNDS) == set()
    assert held_back(cluster(4, 4), GrowthBounds(nodes=2)) == {"e0", "e1"}
    assert held_back(cluster(4, 4), GrowthBounds(nodes=3)) == {"e1"}, "one more for one of them"
    assert held_back(cluster(4, 4, 4), GrowthBounds(nodes=3)) == {"e1"}, "one is free"
    waiting = NodeDemand(1, 4.0, 0.0)
    assert held_back(cluster(4, 4), NO_BOUNDS, waiting) == {"e0", "e1"}, "new nodes are for the job"
    full = replace(demand, nodes=1)
    whole = (Claim("e0", full),)
    capacity = replace(cluster(4), placed={"e0": ("n0",)})
    assert plan(capacity, [], GrowthBounds(nodes=1), whole, whole).held_back == set()


CPUS = 2.0
DEMANDS = st.builds(
    lambda nodes, least: NodeDemand(nodes, CPUS, 0.0, least=min(least, nodes)),
    st.integers(1, 4),
    st.integers(0, 3),
)
QUEUES = st.lists(st.tuples(DEMANDS, st.integers(0, 3)), max_size=6).map(
    lambda jobs: [
        Claim(f"q{n}", demand, overdue=overdue) for n, (demand, overdue) in enumerate(jobs)
    ]
)
CLUSTERS = st.lists(st.sampled_from([1.0, 2.0, 3.0, 4.0]), max_size=5).map(lambda c: cluster(*c))
HELD = st.lists(DEMANDS, max_size=2).map(
    lambda demands: tuple(Claim(f"h{n}", demand) for n, demand in enumerate(demands))
)
BOUNDS = st.builds(
    GrowthBounds,
    nodes=st.none() | st.integers(0, 10),
    cpus=st.none() | st.integers(0, 24).map(float),
)


@given(CLUSTERS, HELD, QUEUES, BOUNDS)
def test_exactly_the_jobs_that_may_not_start_are_asked_for_or_refused(
    capacity: Capacity, held: tuple[Claim, ...], queue: list[Claim], bounds: GrowthBounds
) -> None:
    found = plan(capacity, queue, bounds, held)
    assert not found.requests.keys() & found.refused.keys()
    for place, claim in enumerate(queue):
        wait = admit(capacity, {}, held, queue[:place], claim)
        grows = claim.job in found.requests or claim.job in found.refused
        assert wait.may_start != grows, (claim, wait)


@given(CLUSTERS, HELD, QUEUES, BOUNDS)
def test_growth_stays_within_the_bounds(
    capacity: Capacity, held: tuple[Claim, ...], queue: list[Claim], bounds: GrowthBounds
) -> None:
    before, after = plan(capacity, [], bounds, held).size, plan(capacity, queue, bounds, held).size
    asked = plan(capacity, queue, bounds, held).requests.values()
    assert after.nodes == before.nodes + sum(request.new for request in asked)
    assert bounds.nodes is None or after.nodes <= max(before.nodes, bounds.nodes)
    assert bounds.cpus is None or after.cpus <= max(before.cpus, bounds.cpus)


@given(CLUSTERS, HELD, QUEUES)
def test_a_group_has_no_place_before_its_new_nodes_have_come(
    capacity: Capacity, held: tuple[Claim, ...], queue: list[Claim]
) -> None:
    for request in plan(capacity, queue, held=held).requests.values():
        amount = request.bundle["CPU"]
        allowed = [n for n in capacity.nodes if n.node_id not in request.off and n.cpus >= amount]
        assert 0 < request.new == request.nodes - len(allowed)


@given(CLUSTERS, HELD, QUEUES)
def test_all_jobs_may_start_once_what_was_asked_for_has_come(
    capacity: Capacity, held: tuple[Claim, ...], queue: list[Claim]
) -> None:
    held = tuple(replace(claim, demand=replace(claim.demand, least=0)) for claim in held)
    new = sum(request.new for request in plan(capacity, queue, held=held).requests.values())
    come = tuple(NodeCapacity(f"new{n}", f"10.0.1.{n}", CPUS, 0.0) for n in range(new))
    larger = replace(capacity, nodes=(*capacity.nodes, *come))
    lacking = plan(capacity, [], held=held).size.nodes - plan(capacity, []).size.nodes
    if lacking == 0:  # else started jobs take nodes first
        assert not plan(larger, queue, held=held).requests
