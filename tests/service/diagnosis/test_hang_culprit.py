"""The culprit of a hang: generated worlds with one culprit, and single cases."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.simulation.hung_worlds import draw

from holdfast_service.diagnosis.hang_culprit import (
    HangFinding,
    HangVerdict,
    WorldObservation,
    judge,
    smallest_group,
)
from holdfast_workers.protocol.codec import as_json
from holdfast_workers.protocol.messages import (
    JOINING_PHASE,
    PREPARING_PHASE,
    Beat,
    GroupBeat,
    Inspection,
)

MESH = {"dp_shard": 2, "tp": 2}
WAITS = ("wait (gloo.cc:12)",)


def seen(rank: int, phase: str = "forward", age_s: float = 2.0, **changes: Any) -> Inspection:
    """A rank of `MESH` that has left all collectives it has entered, unless `groups` differs."""
    beat = Beat(
        rank=rank,
        worker=f"w{rank}",
        pid=rank,
        attempt=1,
        step=5,
        phase=phase,
        micro_batch=0,
        age_s=age_s,
        limit_s=1.0,
        groups=(GroupBeat("tp", 3, 3, "all_reduce"),),
    )
    fields = {
        name: changes.pop(name) for name in ("process", "stack", "problem") if name in changes
    }
    return Inspection(
        replace(beat, **changes),
        **{"process": "S", "stack": WAITS, **fields},
    )


def inside(axis: str = "tp", number: int = 4) -> tuple[GroupBeat, ...]:
    return (GroupBeat(axis, number, number - 1, "all_reduce"),)


def world(*of: Inspection) -> WorldObservation:
    return WorldObservation({inspection.beat.rank: inspection for inspection in of})


@given(seed=st.integers(0, 2**32))
@settings(max_examples=300)
def test_the_culprit_is_always_among_the_suspects(seed: int) -> None:
    hung = draw(seed)
    verdict = judge(hung.mesh, hung.look, hung.look)
    assert verdict.finding is HangFinding.HANG, (hung, verdict)
    assert hung.culprit in {suspect.rank for suspect in verdict.suspects}, (hung, verdict)
    assert all(0 < suspect.score <= 1 and suspect.reasons for suspect in verdict.suspects)


def _inspections() -> st.SearchStrategy[Inspection]:
    group = st.builds(
        GroupBeat,
        st.sampled_from(["tp", "dp_shard", "world"]),
        st.sampled_from([4, 5]),
        st.sampled_from([3, 4]),
        st.sampled_from(["all_reduce", "barrier"]),
    )
    return st.builds(
        seen,
        st.just(0),
        st.sampled_from(["forward", "reduce", "save", JOINING_PHASE]),
        st.sampled_from([60.0, 2.0, 0.3]),
        groups=st.lists(group, max_size=3, unique_by=lambda group: group.group).map(tuple),
        process=st.sampled_from(["S", "S", "R", "T"]),
        stack=st.sampled_from([WAITS, ("matmul (model.py:3)",), ()]),
    )


@st.composite
def _observed(draw_: st.DrawFn) -> WorldObservation:
    """Ranks in one or two places; others do not answer, have ended, are done or have left."""
    places = draw_(st.lists(_inspections(), min_size=1, max_size=2))
    look = WorldObservation({}, {}, {})
    for rank in range(4):
        at = draw_(st.sampled_from([*places, "no answer", 4, None]))
        if isinstance(at, Inspection):
            beat = replace(at.beat, rank=rank, worker=f"w{rank}", pid=rank)
            look = replace(look, seen={**look.seen, rank: replace(at, beat=beat)})
        elif isinstance(at, str):
            look = replace(look, silent={**look.silent, rank: at})
        elif isinstance(at, int):
            look = replace(look, ended={**look.ended, rank: at})
    return look


@given(look=_observed(), before=st.none() | _observed(), overdue=st.booleans())
@settings(max_examples=400)
def test_every_observation_gets_a_verdict_on_ranks_of_which_something_is_known(
    look: WorldObservation, before: WorldObservation | None, overdue: bool
) -> None:
    verdict = judge(MESH, look, before, overdue=overdue, without_limits=overdue)
    known = {*look.seen, *look.silent, *look.ended}
    assert known >= {*verdict.accused, *(suspect.rank for suspect in verdict.suspects)}
    assert verdict.reason


@pytest.mark.parametrize("stuck", [(1, 2), (0, 3)])
def test_ranks_that_are_done_are_not_accused_with_those_stuck_in_the_last_collective(
    stuck: tuple[int, ...],
) -> None:
    """They are neither seen nor silent; the smallest group of the others contains them."""
    look = world(*(seen(rank, "save", age_s=9.0, groups=inside("world")) for rank in stuck))
    verdict = judge(MESH, look, look)
    assert verdict.finding is HangFinding.HANG
    assert {suspect.rank for suspect in verdict.suspects} <= set(stuck)


@pytest.mark.seconds
def test_the_exact_culprit_is_named_in_nearly_all_worlds() -> None:
    missed: Counter[str] = Counter()
    for seed in range(2000):
        hung = draw(seed)
        verdict = judge(hung.mesh, hung.look, hung.look)
        missed[hung.hang_kind] += verdict.accused != (hung.culprit,)
    assert missed.total() <= 0.05 * 2000, missed
    assert missed.total() == missed["left out"], "all other kinds are named in every world"


def test_ranks_in_one_long_phase_count_as_waiting_until_the_job_is_overdue() -> None:
    stalled = world(*(seen(rank, "load", process="D") for rank in range(4)))
    verdict = judge(MESH, stalled, stalled)
    assert verdict.finding is HangFinding.WAITING
    assert "load" in verdict.reason
    overdue = judge(MESH, stalled, stalled, overdue=True)
    assert (overdue.finding, overdue.accused) == (HangFinding.HANG, ())


def test_a_long_step_with_ranks_within_their_limits_is_not_a_hang() -> None:
    moving = world(*(seen(rank, age_s=0.3, process="R") for rank in range(4)))
    assert judge(MESH, moving, overdue=True).finding is HangFinding.WAITING
    mixed = world(*(seen(rank, age_s=0.3 if rank == 2 else 2.0) for rank in range(4)))
    assert judge(MESH, mixed, mixed, overdue=True).finding is HangFinding.WAITING
    waits = [seen(rank, groups=inside("world")) for rank in (0, 2, 3)]
    then = world(seen(1, process="R"), *waits)
    now = world(seen(1, process="R", micro_batch=1), *waits)
    assert judge(MESH, now, then, overdue=True).finding is HangFinding.WAITING
    assert judge(MESH, now, now, overdue=True).accused == (1,)


@pytest.mark.parametrize("phase", ["evaluate", "checkpoint", "data", "user"])
def test_peers_wait_for_a_rank_that_is_within_the_limit_of_its_phase(phase: str) -> None:
    others = [seen(rank, "reduce", groups=inside("world")) for rank in (0, 2, 3)]
    look = world(seen(1, phase, limit_s=60.0), *others)
    for overdue in (False, True):
        verdict = judge(MESH, look, look, overdue=overdue)
        assert verdict.finding is HangFinding.WAITING
        assert "rank 1" in verdict.reason


def test_a_rank_that_holds_without_a_lease_is_a_culprit_only_if_its_process_is_stopped() -> None:
    others = [seen(rank, "reduce", age_s=900.0, groups=inside("world")) for rank in (0, 2, 3)]
    look = world(seen(1, "hold", age_s=900.0, limit_s=math.inf), *others)
    assert judge(MESH, look, look, overdue=True).finding is HangFinding.WAITING
    look = world(seen(1, "hold", age_s=900.0, limit_s=math.inf, process="T"), *others)
    assert judge(MESH, look).accused == (1,)


def test_the_first_rank_to_finish_a_long_common_phase_waits_for_the_others() -> None:
    """If all ranks have been in it for long, a small delay is not a hang."""
    late = seen(1, "load", age_s=6.0, process="D")
    look = world(late, *(seen(rank, age_s=0.3, groups=inside("world")) for rank in (0, 2, 3)))
    assert judge(MESH, look, look).finding is HangFinding.WAITING
    look = world(late, *(seen(rank, age_s=1.1, groups=inside("world")) for rank in (0, 2, 3)))
    assert judge(MESH, look, look).accused == (1,)


def test_a_rank_that_makes_progress_between_inspections_is_slow_and_not_hung() -> None:
    others = [seen(rank, groups=inside()) for rank in (1,)]
    slow = world(seen(0, process="R", stack=("matmul (model.py:3)",)), *others)
    first = judge(MESH, slow)
    assert (first.finding, first.accused, first.sure) == (HangFinding.HANG, (0,), False)
    later = world(seen(0, process="R", micro_batch=1), *others)
    assert judge(MESH, later, slow).finding is HangFinding.WAITING
    assert judge(MESH, slow, slow).sure


@pytest.mark.parametrize("process", ["T", "t", "Z", ""])
def test_a_stopped_process_needs_no_second_inspection(process: str) -> None:
    look = world(seen(0, age_s=0.1), seen(1), seen(2, process=process, age_s=0.1), seen(3))
    verdict = judge(MESH, look)
    assert (verdict.finding, verdict.accused, verdict.sure) == (HangFinding.HANG, (2,), True)


def test_ranks_of_a_silent_agent_are_accused_only_if_others_wait_for_them() -> None:
    waiting = {rank: seen(rank, groups=inside("world")) for rank in (0, 1)}
    look = WorldObservation(waiting, {2: "n1 did not answer", 3: "n1 did not answer"})
    assert judge(MESH, look, look).accused == (2, 3)
    free = WorldObservation({rank: seen(rank) for rank in (0, 1)}, look.silent)
    assert judge(MESH, free, free).finding is HangFinding.WAITING
    looping = {0: seen(0, process="R"), 1: waiting[1]}
    look = WorldObservation(looping, look.silent)
    assert judge(MESH, look, look).accused == (0,)


def test_a_stuck_collective_that_all_entered_is_named_after_a_longer_limit() -> None:
    stuck = [seen(rank, groups=inside("dp_shard"), age_s=2.0) for rank in range(4)]
    look = world(*stuck)
    assert judge(MESH, look, look).finding is HangFinding.WAITING
    odd = replace(stuck[1], stack=("send (gloo.cc:4)",))
    long = [replace(rank, beat=replace(rank.beat, age_s=4.0)) for rank in (*stuck, odd)]
    assert judge(MESH, world(*long[:4]), look).accused == ()
    look = world(*long)
    assert judge(MESH, look, look).accused == (1,)


def test_others_wait_for_a_group_that_is_stuck_in_its_own_collective() -> None:
    tp = [seen(rank, groups=inside("tp")) for rank in (0, 1)]
    rest = [seen(rank, "reduce", groups=inside("world", 1)) for rank in (2, 3)]
    look = world(*tp, *rest)
    assert judge(MESH, look, look).accused == (0, 1)


def test_ranks_without_collective_data_are_compared_by_their_steps() -> None:
    ranks = [seen(rank, groups=(), step=6 if rank != 3 else 5) for rank in range(4)]
    look = world(*ranks)
    assert judge(MESH, look, look).accused == (3,)


def test_a_rank_that_has_not_begun_its_order_blocks_the_rendezvous_of_the_others() -> None:
    others = [seen(rank, "rendezvous", groups=(), step=0) for rank in (0, 1, 3)]
    late = world(*others, seen(2, JOINING_PHASE, groups=(), step=0))
    assert judge(MESH, late, late).accused == (2,)
    both = world(*others[:2], *(seen(rank, JOINING_PHASE, groups=(), step=0) for rank in (2, 3)))
    assert judge(MESH, both, both).accused == (2, 3)
    in_time = world(*others, seen(2, JOINING_PHASE, age_s=0.5, groups=(), step=0))
    assert judge(MESH, in_time, in_time).finding is HangFinding.WAITING
    preparing = world(*others, seen(2, PREPARING_PHASE, age_s=0.5, groups=(), step=0))
    assert judge(MESH, preparing, preparing).finding is HangFinding.WAITING


def test_outliers_are_covered_by_the_smallest_group_of_the_mesh() -> None:
    mesh = {"dp_shard": 2, "cp": 2, "tp": 2}
    assert smallest_group(mesh, [5]) == (5,)
    assert smallest_group(mesh, [4, 5]) == (4, 5)
    assert smallest_group(mesh, [1, 5]) == (1, 5)
    assert smallest_group(mesh, [4, 7]) == (4, 5, 6, 7)
    assert smallest_group(mesh, [0, 7]) == tuple(range(8))
    assert smallest_group(mesh, []) == ()


def test_equal_stacks_are_reported_once_and_the_report_is_bounded() -> None:
    mesh = {"dp_shard": 64, "tp": 1}
    deep = tuple(f"frame_{i} ({'x' * 500}.py:{i})" for i in range(100))
    ranks = [
        seen(rank, groups=inside("world"), stack=(f"f{rank} (a.py:1)", *deep))
        for rank in range(1, 64)
    ]
    look = world(seen(0, process="R", stack=deep), *ranks)
    verdict = judge(mesh, look, look)
    assert verdict.accused == (0,)
    assert len(str(as_json(verdict))) < 100_000
    alike = world(*(seen(rank, stack=(f"f (a.py:{rank})",)) for rank in range(4)))
    assert [stack.ranks for stack in judge(MESH, alike).stacks] == [(0, 1, 2, 3)]


def test_the_only_rank_of_a_world_gets_a_longer_limit_and_is_then_named() -> None:
    alone = {"dp_shard": 1, "tp": 1}

    def verdict(age_s: float, overdue: bool = False, **changes: Any) -> HangVerdict:
        look = world(seen(0, age_s=age_s, **changes))
        return judge(alone, look, look, overdue=overdue)

    assert verdict(9.0).finding is HangFinding.WAITING
    assert verdict(9.0, limit_s=0.8).accused == (0,)
    assert verdict(11.0).accused == (0,)
    assert verdict(11.0, limit_s=60.0).finding is HangFinding.WAITING, "its own limit is longer"
    assert verdict(1.5, overdue=True).accused == (0,)
    assert verdict(0.5, overdue=True).finding is HangFinding.WAITING
    assert verdict(0.1, process="T").accused == (0,)
    moving = world(seen(0, age_s=11.0, micro_batch=1))
    assert judge(alone, moving, world(seen(0, age_s=10.5))).finding is HangFinding.WAITING


PAIR = {"dp_shard": 2, "tp": 1}
IN_COLLECTIVE = (
    "poll (kernel)",
    "all_reduce (torch/distributed/distributed_c10d.py:9)",
    "f (a.py:1)",
)


def of_program(rank: int, *groups: GroupBeat, **changes: Any) -> Inspection:
    return seen(rank, "program", 400.0, groups=groups, limit_s=300.0, **changes)


def test_a_rank_that_has_ended_while_the_others_wait_for_it_is_named() -> None:
    counted = of_program(0, GroupBeat("world", 13, 12, "all_reduce"))
    for waiting, where in (
        (counted, "waits in all_reduce 13 of world"),
        (of_program(0, stack=IN_COLLECTIVE), f"waits at {IN_COLLECTIVE[1]}"),
    ):
        look = WorldObservation({0: waiting}, ended={1: 12})
        verdict = judge(PAIR, look, look, overdue=True)
        assert (verdict.finding, verdict.accused, verdict.sure) == (HangFinding.HANG, (1,), True)
        assert verdict.reason == f"rank 1 ended with exit code 0 at step 12 while rank 0 {where}"
        assert verdict.suspects[0].rank == 1


def test_a_rank_that_has_ended_is_not_to_blame_if_nobody_waits_for_it() -> None:
    look = WorldObservation({0: of_program(0, stack=("write (save.py:3)",))}, ended={1: 0})
    verdict = judge(PAIR, look, look, overdue=True)
    assert (verdict.finding, verdict.accused) == (HangFinding.HANG, ())
    assert verdict.reason == (
        "no rank makes progress: rank 0 is at write (save.py:3); rank 1 ended with exit code 0"
    )


def test_ranks_in_different_collectives_are_told_apart() -> None:
    look = world(
        of_program(0, GroupBeat("world", 13, 12, "all_reduce")),
        of_program(1, GroupBeat("world", 13, 12, "barrier")),
    )
    reason = judge(PAIR, look, look, overdue=True).reason
    assert "rank 0 waits in all_reduce 13 of world, rank 1 waits in barrier 13 of world" in reason
    sooner = {0: look.seen[0], 1: replace(look.seen[1], beat=replace(look.beats[1], age_s=299.0))}
    assert judge(PAIR, WorldObservation(sooner)).finding is HangFinding.WAITING
    three = {"dp_shard": 3, "tp": 1}
    look = world(
        *(of_program(rank, GroupBeat("world", 13, 12, "all_reduce")) for rank in (0, 1)),
        of_program(2, GroupBeat("world", 13, 12, "barrier")),
    )
    verdict = judge(three, look, look, overdue=True)
    assert verdict.accused == (2,)
    assert "is in barrier as collective 13 of world, the others in all_reduce" in verdict.reason
