"""Admission of queued jobs: the pure count of free resources."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast_service.job_model.admission import (
    Admission,
    Claim,
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


def claims(*demands: NodeDemand) -> list[Claim]:
    return [Claim(f"job{n}", demand) for n, demand in enumerate(demands)]


def test_a_job_starts_when_it_fits() -> None:
    assert reason_to_wait(nodes(1, 1, 1), [], [], ONE_EACH) is None


def test_an_elastic_job_starts_with_its_fewest_nodes_and_holds_up_to_its_most() -> None:
    elastic = NodeDemand(nodes=4, cpus=1.0, gpus=0.0, least=2)
    assert reason_to_wait(nodes(1, 1), [], [], elastic) is None
    reason = reason_to_wait(nodes(1), [], [], elastic)
    assert reason is not None and reason.startswith("2 nodes with 1 CPUs")
    assert reason_to_wait(nodes(1, 1, 1), [], claims(elastic), NodeDemand(1, 1, 0)) is None
    assert reason_to_wait(nodes(1, 1, 1), claims(elastic), [], NodeDemand(1, 1, 0))


def test_bundles_of_one_job_need_different_nodes() -> None:
    assert reason_to_wait(nodes(9, 9), [], [], ONE_EACH)


def test_resources_of_started_jobs_are_not_free() -> None:
    reason = reason_to_wait(nodes(1, 1, 1), claims(NodeDemand(1, 0.5, 0)), [], ONE_EACH)
    assert reason is not None
    assert "2 of 3 nodes" in reason


def test_an_older_queued_job_that_fits_goes_first() -> None:
    small = NodeDemand(1, 1.0, 0)
    assert reason_to_wait(nodes(1, 1, 1), [], claims(ONE_EACH), small)
    # ... and lets others pass where it does not.
    assert reason_to_wait(nodes(1, 1), [], claims(ONE_EACH), small) is None


def test_tenths_of_a_cpu_add_up_to_a_whole_node() -> None:
    held = claims(*[NodeDemand(1, 0.1, 0)] * 9)
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
    admission = admit(four, quarantined, claims(NodeDemand(1, 1.0, 0.0)), [], ONE_EACH)
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
        if reason_to_wait(capacity, claims(*held), [], demand) is None:
            held.append(demand)
    assert sum(demand.nodes * demand.cpus for demand in held) <= sum(cpus) + 1e-6
    assert not any(demand.gpus for demand in held)


def test_what_other_programs_use_is_not_free() -> None:
    shared = NodeCapacity("n1", "h", 1.0, 0.0, foreign_cpus=0.5)
    capacity = Capacity((*nodes(1).nodes, shared), can_grow=False)
    assert reason_to_wait(capacity, [], [], NodeDemand(2, 0.5, 0)) is None
    assert "1 of 2 nodes have them" in str(reason_to_wait(capacity, [], [], NodeDemand(2, 1, 0)))


def test_a_placed_job_takes_its_own_nodes() -> None:
    capacity = replace(nodes(1, 1, 1), placed={"job0": ["n0"]})
    held = claims(NodeDemand(nodes=3, cpus=1.0, gpus=0.0, least=1))
    assert reason_to_wait(capacity, held, [], NodeDemand(2, 1.0, 0)) is None
    assert reason_to_wait(nodes(1, 1, 1), held, [], NodeDemand(1, 1.0, 0)), "not placed yet"


def test_nodes_are_reserved_for_the_oldest_overdue_job() -> None:
    capacity, small = replace(nodes(1, 1, 1), placed={"job0": ["n1"]}), NodeDemand(1, 1.0, 0)
    held, waiting = claims(small), Claim("big", ONE_EACH, "llama", is_overdue=True)
    assert reason_to_wait(capacity, held, [replace(waiting, is_overdue=False)], small) is None
    reason = reason_to_wait(capacity, held, [waiting], small)
    assert reason is not None
    assert reason.endswith("0 of 3 nodes have them; 3 are reserved for llama")
    too_large = replace(waiting, demand=NodeDemand(4, 1.0, 0))
    assert reason_to_wait(capacity, held, [too_large], small) is None


@dataclass
class Running:
    job: int
    demand: NodeDemand
    nodes: list[str]
    until: int


@dataclass
class Queue:
    """Jobs that arrive, wait, run and end, on nodes that have room for them."""

    capacity: Capacity
    now: int = 0
    waiting: dict[int, tuple[NodeDemand, int, int]] = field(default_factory=dict)
    """By job: its demand, how long it will run, and since when it waits."""
    running: list[Running] = field(default_factory=list)
    longest_wait: int = 0

    def placed(self) -> Capacity:
        return replace(self.capacity, placed={str(each.job): each.nodes for each in self.running})

    def pass_time(self) -> None:
        self.now += 1
        self.running = [each for each in self.running if each.until > self.now]
        for job in sorted(self.waiting):
            demand, runs_for, since = self.waiting[job]
            before = [
                Claim(str(other), older, is_overdue=self.now - waits > OVERDUE)
                for other, (older, _, waits) in self.waiting.items()
                if other < job
            ]
            held = [Claim(str(each.job), each.demand) for each in self.running]
            why = reason_to_wait(self.placed(), held, before, demand)
            free = self.free(demand)
            if why is None:
                assert len(free) >= demand.nodes, "used twice"
                del self.waiting[job]
                self.running.append(Running(job, demand, free[: demand.nodes], self.now + runs_for))
                self.longest_wait = max(self.longest_wait, self.now - since)
            elif not before:
                assert len(free) < demand.nodes, "the oldest job waits although it has room"

    def free(self, demand: NodeDemand) -> list[str]:
        used = Counter(
            {
                node.node_id: sum(
                    each.demand.cpus for each in self.running if node.node_id in each.nodes
                )
                for node in self.capacity.nodes
            }
        )
        left = {node.node_id: node.cpus - used[node.node_id] for node in self.capacity.nodes}
        return sorted(
            (node for node, cpus in left.items() if cpus + 1e-9 >= demand.cpus),
            key=lambda node: (-left[node], node),
        )


OVERDUE, LONGEST_RUN = 3, 6
arrivals = st.lists(
    st.tuples(st.integers(1, 3), st.sampled_from([0.5, 1.0]), st.integers(1, LONGEST_RUN)),
    max_size=2,
)


@given(
    st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=1, max_size=4),
    st.lists(arrivals, min_size=10, max_size=60),
)
@settings(max_examples=300)
def test_no_job_starves_and_nothing_is_used_twice(
    cpus: list[float], history: list[list[tuple[int, float, int]]]
) -> None:
    """More jobs arrive than there is room for, for a while; then all of them come to run."""
    queue = Queue(nodes(*cpus))
    total = 0
    for arriving in history:
        for count, needs, runs_for in arriving:
            demand = NodeDemand(count, needs, 0.0)
            if sum(node >= needs for node in cpus) >= count:
                queue.waiting[total] = (demand, runs_for, queue.now)
                total += 1
        oldest = min(queue.waiting, default=None)
        queue.pass_time()
        if oldest in queue.waiting:
            _, _, since = queue.waiting[oldest]
            # Overdue jobs older than this one have gone first, each within the runs on its nodes.
            started = sum(1 for job in range(oldest) if job not in queue.waiting)
            assert queue.now - since <= OVERDUE + (started + 1) * 2 * LONGEST_RUN * len(cpus)
    for _ in range((total + 1) * (OVERDUE + 2 * LONGEST_RUN)):
        queue.pass_time()
    assert not queue.waiting


@pytest.mark.parametrize("reserves", [True, False])
def test_small_jobs_that_keep_coming_do_not_starve_a_large_one(
    monkeypatch: pytest.MonkeyPatch, reserves: bool
) -> None:
    if not reserves:
        monkeypatch.setattr(sys.modules[__name__], "OVERDUE", 10_000)
    queue = Queue(nodes(1, 1))
    queue.waiting[0] = (NodeDemand(1, 0.5, 0.0), 4, 0)
    queue.pass_time()
    queue.waiting[1] = (NodeDemand(2, 1.0, 0.0), 4, queue.now)
    for tick in range(100):  # each outlasts the arrival of the next
        queue.waiting[2 + tick] = (NodeDemand(1, 0.5, 0.0), 4, queue.now)
        queue.pass_time()
    assert (1 not in queue.waiting) == reserves
