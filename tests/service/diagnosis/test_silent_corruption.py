"""The rank with wrong bits is named by majority, by repetition or by a referee; never another."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast_service.diagnosis.silent_corruption import (
    Evidence,
    RankHolder,
    after_repeat,
    judge_corruption,
)
from holdfast_service.job_model.supervisor_protocol import EventKind, SupervisorEvent
from holdfast_service.recovery.core_state.event_replay import Facts
from holdfast_workers.protocol.findings import ReplicaFinding


def seen(
    *digests: str, step: int = 5, changed: tuple[int, ...] = (), refereed: int | None = None
) -> Evidence:
    """One group of replicas, in rank order."""
    differ = len(set(digests)) > 1
    finding = ReplicaFinding(
        attempt=1,
        step=step,
        bad_from=step,
        groups=(tuple(range(len(digests))),) if differ else (),
        digests=dict(enumerate(digests)) if differ else {},
        changed=changed,
    )
    return Evidence(finding, {rank: RankHolder(f"n{rank}") for rank in range(9)}, refereed)


def test_a_rank_whose_parameters_changed_is_named() -> None:
    assert judge_corruption(seen(changed=(1,))).ranks == (1,)
    assert judge_corruption(seen("a", "b", changed=(0,))).ranks == (0,)


@given(
    digests=st.lists(st.sampled_from("abc"), min_size=2, max_size=5),
    again=st.lists(st.sampled_from("abc"), min_size=5, max_size=5),
    refereed=st.none() | st.integers(0, 4),
)
def test_differing_digests_accuse_nobody_where_bits_do_not_repeat(
    digests: list[str], again: list[str], refereed: int | None
) -> None:
    first, now = seen(*digests), seen(*again[: len(digests)], refereed=refereed)
    verdicts = [
        judge_corruption(first, repeatable=False),
        judge_corruption(now, first, repeatable=False),
        after_repeat(first, again, repeatable=False),
    ]
    assert all(verdict.ranks == () and verdict.referee is None for verdict in verdicts)
    assert judge_corruption(seen(changed=(1,)), repeatable=False).ranks == (1,)


def test_the_odd_rank_of_three_replicas_is_named() -> None:
    assert judge_corruption(seen("a", "b", "a")).ranks == (1,)
    assert judge_corruption(seen("a", "b", "c")).ranks == ()
    assert judge_corruption(seen("a", "a", "b", "b")).ranks == ()


def test_each_group_of_replicas_is_judged_separately() -> None:
    digests = {0: "a", 2: "a", 4: "x", 1: "b", 3: "y", 5: "b"}
    finding = ReplicaFinding(1, 5, 5, groups=((0, 2, 4), (1, 3, 5)), digests=digests)
    assert judge_corruption(Evidence(finding)).ranks == (4, 3)


def test_of_two_replicas_the_rank_with_the_same_bits_again_was_right() -> None:
    first = seen("a", "b")
    assert judge_corruption(first).ranks == ()
    assert judge_corruption(first).referee is None
    assert after_repeat(first, ("a", "a")).ranks == (1,)
    assert after_repeat(first, ("b", "b")).ranks == (0,)
    assert after_repeat(first, ("c", "c")).ranks == ()


def test_a_rank_with_different_bits_in_each_repetition_is_named() -> None:
    assert judge_corruption(seen("a", "c"), seen("a", "b")).ranks == (1,)


def test_a_difference_at_another_step_is_judged_anew() -> None:
    verdict = judge_corruption(seen("a", "b", step=9), seen("a", "b", step=5))
    assert (verdict.ranks, verdict.referee) == ((), None)


def test_a_referee_decides_between_two_replicas_that_differ_each_time() -> None:
    first, again = seen("a", "b"), seen("a", "b")
    assert judge_corruption(again, first).referee == 1
    # Another node computed rank 1 and agrees with rank 0: rank 1's node was wrong.
    assert after_repeat(again, ("a", "a")).ranks == (1,)
    # It repeats the bits of rank 1: rank 0's node is wrong.
    other = judge_corruption(seen("a", "b", refereed=1), again)
    assert other.ranks == (0,)


@given(st.integers(2, 6), st.integers(0, 5), st.sampled_from(["once", "always", "each time"]))
def test_only_the_wrong_rank_is_named(replicas: int, wrong: int, corruption: str) -> None:
    """Simulated to the end, as the supervisor does it."""
    wrong %= replicas
    moved: int | None = None  # the rank that a good node computes now
    before = None
    for turn in range(4):
        computes = "always" if corruption == "always" else f"turn {turn}"
        bad = moved != wrong and not (corruption == "once" and turn)
        digests = ["good"] * replicas
        if bad:
            digests[wrong] = computes
        if not bad:
            assert before is not None
            assert after_repeat(before, digests).ranks == (wrong,)
            return
        evidence = seen(*digests, refereed=moved)
        verdict = judge_corruption(evidence, before)
        if verdict.ranks:
            assert verdict.ranks == (wrong,)
            return
        before, moved = evidence, verdict.referee
    raise AssertionError("no rank was named")


def test_a_restarted_supervisor_knows_what_is_corrupt() -> None:
    restore = {"step": 0, "attempt": 0}
    formed = {"attempt": 1, "restore": restore, "members": [], "mesh": {}, "world_size": 0}
    ran = {"attempt": 1, "members": [], "first_step": 1}
    bad = {
        "step": 9,
        "uri": "",
        "message": "replicas differ",
        "corrupt": {"attempt": 1, "step": 9},
    }
    events = (
        (EventKind.ATTEMPT_FORMING, formed),
        (EventKind.ATTEMPT_RUNNING, ran),
        (EventKind.CHECKPOINT_BAD, bad),
    )
    facts = Facts.from_events(
        SupervisorEvent(seq, float(seq), kind, data) for seq, (kind, data) in enumerate(events, 1)
    )
    assert facts.line.contains(1, 8)
    assert not facts.line.contains(1, 9)
    assert facts.line.contains(2, 9)
