"""Admission of queued jobs: the pure count of free resources."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.simulation.queue_histories import HAPPENINGS, PromiseBroken, QueueHistory
from tests.support.simulation.simulated_queue_job import ENDLESS

from holdfast_service.job_model.admission import (
    Admission,
    Claim,
    LackedNodes,
    NodeDemand,
    QueuePass,
    Reservation,
    admit,
    times_overdue,
)
from holdfast_service.job_model.node_labels import rules_of
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


def asking(demand: NodeDemand, *, overdue: int = 0) -> Claim:
    return Claim("asking", demand, overdue=overdue)


def reason_to_wait(
    capacity: Capacity, held: list[Claim], before: list[Claim], wanted: NodeDemand
) -> str | None:
    admission = admit(capacity, {}, held, before, asking(wanted))
    return None if admission.may_start else admission.why


def test_a_job_starts_when_it_fits() -> None:
    assert reason_to_wait(nodes(1, 1, 1), [], [], ONE_EACH) is None


def test_an_elastic_job_starts_with_its_fewest_nodes_and_holds_up_to_its_most() -> None:
    elastic = NodeDemand(nodes=4, cpus=1.0, gpus=0.0, least=2)
    assert reason_to_wait(nodes(1, 1), [], [], elastic) is None
    reason = reason_to_wait(nodes(1), [], [], elastic)
    assert reason is not None and reason.startswith("2 nodes with 1 CPU")
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


def test_a_cluster_that_can_grow_admits_no_job_before_its_nodes_are_there() -> None:
    assert reason_to_wait(Capacity((), can_grow=True), [], [], ONE_EACH)
    assert reason_to_wait(Capacity((), can_grow=True, unlimited=True), [], [], ONE_EACH) is None


def labelled(*disks: str, fpgas: float = 0.0) -> Capacity:
    """Nodes of one CPU; the last one has all the fpgas."""
    last = len(disks) - 1
    return Capacity(
        tuple(
            NodeCapacity(
                f"n{n}",
                "h",
                1.0,
                0.0,
                custom={"fpga": fpgas} if fpgas and n == last else {},
                labels={"disk": disk} if disk else {},
            )
            for n, disk in enumerate(disks)
        ),
        can_grow=False,
    )


NVME = NodeDemand(nodes=1, cpus=1.0, gpus=0.0, labels=rules_of({"disk": ["nvme"]}))


def test_a_job_whose_label_no_node_has_waits_with_what_the_nodes_have_and_others_go_on() -> None:
    cluster = labelled("hdd", "hdd", "")
    head = NodeCapacity("head", "h", 0.0, 0.0)
    admission = admit(replace(cluster, nodes=(*cluster.nodes, head)), {}, [], [], asking(NVME))
    assert admission.why == (
        "1 node is needed: no node has label disk=nvme; nodes have disk=hdd (2), 1 has no disk"
    )
    overdue = [Claim("choosy", NVME, overdue=1)]
    assert admit(cluster, {}, [], overdue, asking(ONE_EACH)).may_start
    assert admit(labelled("hdd", "nvme"), {}, [], [], asking(NVME)).may_start


def test_a_labelled_node_in_use_is_waited_for_and_reserved_and_others_are_not() -> None:
    cluster = labelled("hdd", "nvme")
    busy = replace(cluster, placed={"job0": ("n1",)})
    held = claims(NodeDemand(1, 1.0, 0.0))
    admission = admit(busy, {}, held, [], asking(NVME, overdue=1))
    assert admission.why == (
        "1 node with 1 CPU and 0 GPUs, labelled disk=nvme, free is needed, 0 of 2 nodes have "
        "them; 1 are reserved for it"
    )
    before = [Claim("nvme", NVME, overdue=1)]
    assert admit(cluster, {}, [], before, asking(NodeDemand(1, 1, 0))).may_start


def test_custom_resources_are_counted_like_cpus() -> None:
    cluster, wanted = labelled("", "", fpgas=2.0), NodeDemand(1, 0.1, 0.0, custom=(("fpga", 1.5),))
    assert reason_to_wait(cluster, [], [], wanted) is None
    reason = reason_to_wait(cluster, claims(wanted), [], wanted)
    assert reason == (
        "1 node with 0.1 CPUs, 0 GPUs and 1.5 fpga free is needed, 0 of 2 nodes have them"
    )
    foreign = replace(cluster.nodes[1], foreign_custom={"fpga": 1.0})
    in_use = replace(cluster, nodes=(cluster.nodes[0], foreign))
    assert reason_to_wait(in_use, [], [], wanted) == reason
    assert reason_to_wait(labelled("", fpgas=1.0), [], [], wanted) == (
        "1 node is needed: no node has 1.5 fpga; the most is 1"
    )


def aside(standing: NodeStanding, *names: str) -> dict[str, Avoided]:
    return {name: Avoided(standing, f"{standing}: of late") for name in names}


def on_machines(*hosts: str) -> Capacity:
    found = tuple(NodeCapacity(f"r{n}", host, 1.0, 0.0) for n, host in enumerate(hosts))
    return Capacity(found, can_grow=False)


def test_quarantined_nodes_are_used_with_a_reason_if_the_others_are_too_few() -> None:
    four = on_machines("10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4")
    quarantined = aside(NodeStanding.QUARANTINED, "10.0.0.2")
    assert admit(four, quarantined, [], [], asking(ONE_EACH)) == Admission(True)
    admission = admit(four, quarantined, claims(NodeDemand(1, 1.0, 0.0)), [], asking(ONE_EACH))
    assert admission.may_start
    assert admission.why == (
        "nodes in quarantine are used, because 3 nodes with 1 CPU and 0 GPUs free are needed, 2 "
        "of 3 nodes have them; 1 more are set aside: 10.0.0.2 (quarantined: of late)"
    )


def test_cordoned_nodes_are_not_used_and_the_reason_to_wait_names_them() -> None:
    four = on_machines("10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4")
    cordoned = aside(NodeStanding.CORDONED, "10.0.0.1", "10.0.0.9")
    assert admit(four, cordoned, [], [], asking(ONE_EACH)) == Admission(True)
    both = cordoned | aside(NodeStanding.QUARANTINED, "10.0.0.2")
    assert admit(four, both, [], [], asking(ONE_EACH)).may_start
    admission = admit(
        four, both | aside(NodeStanding.CORDONED, "10.0.0.3"), [], [], asking(ONE_EACH)
    )
    assert not admission.may_start
    assert admission.why.endswith(
        "2 of 2 nodes have them; 2 more are set aside: 10.0.0.1 (cordoned: of late), 10.0.0.3 "
        "(cordoned: of late)"
    )


def test_a_long_list_of_set_aside_nodes_is_truncated() -> None:
    many = on_machines(*(f"10.0.0.{n}" for n in range(9)))
    cordoned = aside(NodeStanding.CORDONED, *(f"10.0.0.{n}" for n in range(7)))
    assert admit(many, cordoned, [], [], asking(ONE_EACH)).why.endswith(
        "10.0.0.3 (cordoned: of late), 3 others"
    )


def test_all_nodes_of_a_machine_are_set_aside_with_it() -> None:
    two_on_one = on_machines("10.0.0.1", "10.0.0.1", "10.0.0.2")
    assert admit(two_on_one, {}, [], [], asking(ONE_EACH)).may_start
    cordoned = aside(NodeStanding.CORDONED, "10.0.0.1")
    assert admit(two_on_one, cordoned, [], [], asking(ONE_EACH)).why.endswith(
        "1 of 1 node has them; 1 more are set aside: 10.0.0.1 (cordoned: of late)"
    )


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
    held, waiting = claims(small), Claim("big", ONE_EACH, "llama", overdue=1)
    assert reason_to_wait(capacity, held, [replace(waiting, overdue=0)], small) is None
    reason = reason_to_wait(capacity, held, [waiting], small)
    assert reason is not None
    assert reason.endswith("0 of 3 nodes have them; 3 are reserved for llama")
    beside, two = replace(nodes(1, 1, 0.5), placed={"job0": ["n1"]}), NodeDemand(2, 1.0, 0.0)
    admission = admit(
        beside, {}, held, [replace(waiting, demand=two)], asking(replace(small, cpus=0.5))
    )
    assert admission == Admission(True, reserved_nodes=("n0", "n1"))
    too_large = replace(waiting, demand=NodeDemand(4, 1.0, 0))
    assert reason_to_wait(capacity, held, [too_large], small) is None


FOUR = ("10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4")
SMALL = NodeDemand(1, 1.0, 0.0)
TOO_SMALL = aside(NodeStanding.CORDONED, "10.0.0.4")
"""What a node is for one job only."""


def with_one_in_use(node: str, *hosts: str) -> Capacity:
    """By `job0`."""
    return replace(on_machines(*hosts), placed={"job0": [node]})


def test_a_node_in_quarantine_is_reserved_for_a_job_that_needs_it() -> None:
    """It comes last; only a job for which the others are too few keeps it."""
    capacity = with_one_in_use("r0", *FOUR)
    quarantined = aside(NodeStanding.QUARANTINED, "10.0.0.2")
    for needed, reserved in ((4, {"r0", "r1", "r2", "r3"}), (3, set())):
        before = [Claim("large", NodeDemand(needed, 1.0, 0.0), overdue=1)]
        queue = QueuePass(capacity, quarantined, claims(SMALL))
        starts = bool(queue.serve(*before))
        assert (starts, set(queue.reserved)) == (needed == 3, reserved)
        admission = admit(capacity, quarantined, claims(SMALL), before, asking(SMALL))
        assert not admission.may_start
    well = QueuePass(capacity, quarantined, claims(SMALL))
    assert well.serve(asking(NodeDemand(2, 1.0, 0.0))) == ["r2", "r3"]


def test_an_idle_node_in_quarantine_is_kept_before_a_node_that_is_in_use() -> None:
    capacity = with_one_in_use("r0", *FOUR[:3])
    capacity = replace(capacity, placed={"job0": ["r0", "r2"]})
    quarantined = aside(NodeStanding.QUARANTINED, "10.0.0.2")
    queue = QueuePass(capacity, quarantined, claims(NodeDemand(2, 1.0, 0.0)))
    assert queue.serve(asking(NodeDemand(2, 1.0, 0.0), overdue=1)) == []
    assert set(queue.reserved) == {"r0", "r1"}, "r1 is idle"


def test_a_node_that_does_not_suit_a_job_is_kept_for_those_before_it() -> None:
    before = [Claim("large", NodeDemand(4, 1.0, 0.0), overdue=1)]
    admission = admit(
        with_one_in_use("r0", *FOUR),
        {},
        claims(SMALL),
        before,
        replace(asking(SMALL), unusable=TOO_SMALL),
    )
    assert (admission.may_start, admission.reservation) == (False, Reservation("large", "large", 4))
    assert admission.why.endswith("set aside: 10.0.0.4 (cordoned: of late)")


def test_a_node_that_does_not_suit_a_job_is_free_for_those_after_it() -> None:
    choosy = Claim("choosy", SMALL, overdue=1, unusable=TOO_SMALL)
    capacity = with_one_in_use("r0", FOUR[0], FOUR[3])
    assert not admit(capacity, {}, claims(SMALL), [], choosy).may_start
    admission = admit(capacity, {}, claims(SMALL), [choosy], asking(SMALL))
    assert admission == Admission(True, reserved_nodes=("r0",))


def test_a_started_job_without_its_place_is_expected_off_the_nodes_that_were_reserved() -> None:
    kept = aside(NodeStanding.CORDONED, "r0", "r1")
    capacity = on_machines(*FOUR[:3])
    queue = QueuePass(capacity, {}, [Claim("job0", SMALL, unusable=kept)])
    assert queue.fitting(asking(SMALL)) == ["r0", "r1"]


def waited_for(capacity: Capacity, aside: dict[str, Avoided], claims: list[Claim]) -> set[str]:
    return set(LackedNodes(capacity, aside, claims).beside("elastic"))


def test_only_a_job_that_can_start_some_day_waits_for_nodes() -> None:
    capacity, every = with_one_in_use("r0", *FOUR), {"r0", "r1", "r2", "r3"}
    waits = [Claim("large", NodeDemand(4, 1.0, 0.0)), Claim("job0", SMALL)]
    assert waited_for(capacity, {}, waits) == every
    assert waited_for(capacity, aside(NodeStanding.QUARANTINED, "10.0.0.4"), waits) == every
    assert waited_for(capacity, TOO_SMALL, waits) == set(), "cordoned for all"
    choosy = [replace(claim, unusable=TOO_SMALL) for claim in waits]
    assert waited_for(capacity, {}, choosy) == set()
    assert waited_for(capacity, {}, waits[1:]) == set(), "it has its node"


def test_an_elastic_job_keeps_off_the_nodes_that_others_wait_for_and_takes_the_rest() -> None:
    with_gpu = NodeCapacity("gpu", "10.0.0.9", 1.0, 1.0)
    capacity = Capacity((*nodes(1, 1).nodes, with_gpu), can_grow=False, placed={"me": ("n0",)})
    waits = Claim("other", NodeDemand(1, 1.0, 1.0))
    lacked = LackedNodes(capacity, {}, [waits, replace(waits, job="third")])
    assert lacked.beside("me") == lacked.beside("other") == {"gpu"}
    assert not lacked.leaves_none("me", SMALL), "n1 may be had"
    assert lacked.leaves_none("me", NodeDemand(1, 0.5, 1.0))
    assert lacked.leaves_none("me", NodeDemand(1, 2.0, 0.0)), "no node is large enough"
    for_any = LackedNodes(capacity, {}, [waits, Claim("fourth", SMALL)])
    assert for_any.leaves_none("me", SMALL)
    assert LackedNodes(capacity, {}, [waits]).beside("other") == set(), "its own need"
    assert not LackedNodes(capacity, {}, []).leaves_none("me", NodeDemand(1, 2.0, 0.0))


def test_more_nodes_are_reserved_for_a_job_each_time_that_it_has_waited_twice_as_long() -> None:
    waits = (299.0, 300.0, 301.0, 599.0, 601.0, 1199.0, 1201.0, 9601.0)
    assert [times_overdue(waited_s, 300.0) for waited_s in waits] == [0, 0, 1, 1, 2, 2, 3, 6]
    assert [times_overdue(waited_s, 0.0) for waited_s in (0.0, 1.0, 119.0, 121.0)] == [0, 1, 1, 2]


@pytest.mark.seconds
@pytest.mark.parametrize("block", range(4))
def test_random_histories_of_the_queue_keep_its_promises(block: int) -> None:
    play(range(block * 100, block * 100 + 100))


def test_a_waiting_job_knows_for_which_job_nodes_are_reserved() -> None:
    capacity, small = nodes(1, 1, 1), NodeDemand(1, 1.0, 0)
    held, big = claims(small), Claim("big", ONE_EACH, "llama", overdue=1)
    younger = admit(capacity, {}, held, [big], asking(small))
    assert younger.reservation == Reservation("big", "llama", 3)
    itself = admit(capacity, {}, held, [], asking(ONE_EACH, overdue=1))
    assert itself.reservation == Reservation("asking", "asking", 3)
    assert itself.why.endswith("; 3 are reserved for it")
    assert admit(capacity, {}, held, [], asking(ONE_EACH)).reservation is None
    too_large = NodeDemand(4, 1.0, 0)
    assert admit(capacity, {}, held, [], asking(too_large, overdue=1)).reservation is None
    behind = admit(capacity, {}, held, [big], asking(ONE_EACH, overdue=1))
    assert behind.reservation == Reservation("big", "llama", 3)


@pytest.mark.soak
@pytest.mark.timeout(7_200)
def test_a_hundred_thousand_histories_of_the_queue_keep_its_promises() -> None:
    count, began = 100_000, time.monotonic()
    with ProcessPoolExecutor(max_workers=4, mp_context=get_context("spawn")) as pool:
        chunks = [range(start, start + 500) for start in range(0, count, 500)]
        counts = sum(pool.map(play, chunks), Counter[str]())
    passed_s = time.monotonic() - began
    print(f"{count} histories in {passed_s:.0f} s, {count / passed_s:.0f} a second: {counts}")


def play(seeds: Iterable[int]) -> Counter[str]:
    """Histories in which everything happens that can happen."""
    counts = sum((QueueHistory(seed).play() for seed in seeds), Counter[str]())
    assert set(counts) - {"without room", "back at once"} == HAPPENINGS
    # Where jobs will be placed is an estimate: a few wait for their place after they have started.
    assert counts["without room"] < counts["started"] / 100
    return counts


@pytest.mark.parametrize("reserves", [True, False])
def test_small_jobs_that_keep_coming_do_not_starve_a_large_one(reserves: bool) -> None:
    queue = QueueHistory(0, nodes=(1.0, 1.0), reserves=reserves)
    queue.submit(NodeDemand(1, 0.5, 0.0), 4)
    queue.pass_time()
    assert starves(queue, NodeDemand(2, 1.0, 0.0), NodeDemand(1, 0.5, 0.0)) == (not reserves)


@pytest.mark.parametrize("keeps_off", [True, False])
@pytest.mark.parametrize(("nodes", "most"), [((1.0, 2.0), 1), ((1.0, 1.0), 2)])
def test_jobs_that_keep_coming_do_not_take_the_node_that_is_reserved(
    keeps_off: bool, nodes: tuple[float, ...], most: int
) -> None:
    """Each fits beside the reserved node, which may have more room; an elastic one wants both."""
    queue = QueueHistory(0, nodes=nodes, keeps_off=keeps_off)
    small = NodeDemand(most, 0.5, 0.0, least=1)
    for work in (2, 4):
        for _ in range(3 - most):
            queue.submit(small, work)
        queue.pass_time()
    assert starves(queue, NodeDemand(1, max(nodes), 0.0), small) == (not keeps_off)


@pytest.mark.parametrize("reserves_more", [True, False])
def test_a_job_does_not_starve_beside_one_that_never_ends(reserves_more: bool) -> None:
    """Of the nodes in use, the one with most room never has enough."""
    queue = QueueHistory(0, nodes=(2.0, 2.0), reserves_more=reserves_more)
    queue.submit(NodeDemand(1, 0.5, 0.0), ENDLESS)
    large, small = NodeDemand(1, 2.0, 0.0), NodeDemand(1, 1.0, 0.0)
    for _ in range(4):
        queue.submit(small, 1)
        queue.pass_time()
    assert starves(queue, large, small, work=3) == (not reserves_more)


def starves(queue: QueueHistory, large: NodeDemand, small: NodeDemand, work: int = 4) -> bool:
    """Whether the large job still waits when many small ones, each of which outlasts the arrival of
    the next, have gone by."""
    number = queue.submit(large, 4)
    try:
        for _ in range(100):
            queue.submit(small, work)
            queue.pass_time()
    except PromiseBroken as broken:
        assert f"job {number} " in str(broken)
    return number in queue.jobs and not queue.jobs[number].is_admitted
