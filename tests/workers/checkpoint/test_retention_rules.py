"""Retention as pure rules, over every kind of shelf that hypothesis thinks of."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from holdfast_workers.checkpoint.retention_rules import Stored, best, doomed
from holdfast_workers.spec import KeepBestSpec, RemoteTierSpec

BEST = st.builds(
    KeepBestSpec,
    metric=st.sampled_from(["loss", "grad_norm"]),
    mode=st.sampled_from(["min", "max"]),
    n=st.integers(1, 3),
)
RULES = st.builds(
    RemoteTierSpec,
    keep=st.integers(1, 4),
    keep_every=st.none() | st.integers(1, 5),
    keep_best=st.none() | BEST,
)
METRICS = st.dictionaries(
    st.sampled_from(["loss", "grad_norm"]), st.sampled_from([0.5, 1.0, 2.0, math.nan, math.inf])
)
STORED = st.builds(
    Stored,
    step=st.integers(1, 12),
    attempt=st.integers(1, 3),
    complete=st.booleans(),
    metrics=METRICS,
    pinned=st.booleans(),
    needed=st.booleans(),
)
SHELVES = st.lists(STORED, max_size=12, unique_by=lambda one: one.age)


def _doomed(
    shelf: list[Stored], rules: RemoteTierSpec, bad: set[tuple[int, int]], attempt: int = 1
) -> set[tuple[int, int]]:
    going = doomed(shelf, rules, current_attempt=attempt, is_whole=lambda one: one.age not in bad)
    return {one.stored.age for one in going}


@given(SHELVES, RULES, st.integers(0, 12), st.integers(1, 3))
def test_what_must_stay_stays(
    shelf: list[Stored], rules: RemoteTierSpec, damaged: int, attempt: int
) -> None:
    complete = sorted((one for one in shelf if one.complete), key=lambda one: one.age)[::-1]
    bad = {one.age for one in complete[:damaged]}  # the newest so many
    going = _doomed(shelf, rules, bad, attempt)
    for one in shelf:
        if one.complete and (one.pinned or one.needed):
            assert one.age not in going
        if not one.complete and one.attempt == attempt:
            assert one.age not in going
    whole = [one.age for one in complete if one.age not in bad]
    assert not whole or whole[0] not in going
    assert not going & {one.age for one in complete[: rules.keep]}
    if rules.keep_every is not None:
        assert not [
            step
            for step, _ in going & {one.age for one in complete}
            if step % rules.keep_every == 0
        ]
    if rules.keep_best is not None:
        assert not going & {one.age for one in best(complete, rules.keep_best)}
    if not complete:
        assert not going


@given(SHELVES, RULES)
def test_what_no_rule_keeps_goes_and_nothing_is_left_to_do(
    shelf: list[Stored], rules: RemoteTierSpec
) -> None:
    going = _doomed(shelf, rules, set())
    complete = sorted((one for one in shelf if one.complete), key=lambda one: one.age)[::-1]
    plain = rules.model_copy(update={"keep_every": None, "keep_best": None})
    free = {one.age for one in complete[rules.keep :] if not (one.pinned or one.needed)}
    assert _doomed([one for one in shelf if one.complete], plain, set()) == free
    left = [one for one in shelf if one.age not in going]
    assert _doomed(left, rules, set()) == set()


@given(SHELVES, RULES)
def test_nothing_is_read_through_unless_something_complete_goes(
    shelf: list[Stored], rules: RemoteTierSpec
) -> None:
    asked: list[tuple[int, int]] = []

    def is_whole(one: Stored) -> bool:
        asked.append(one.age)
        return True

    going = doomed(shelf, rules, current_attempt=1, is_whole=is_whole)
    assert len(asked) <= 1
    if any(one.stored.complete for one in going):
        assert asked == [max(one.age for one in shelf if one.complete)]


def test_the_best_are_by_value_then_newer_and_need_one() -> None:
    shelf = [
        Stored(1, 1, metrics={"loss": 1.0}),
        Stored(2, 1, metrics={"loss": 0.5}),
        Stored(3, 1, metrics={"loss": 0.5}),
        Stored(4, 1, metrics={"loss": math.nan}),
        Stored(5, 1),
    ]
    assert [one.step for one in best(shelf, KeepBestSpec(n=2))] == [3, 2]
    assert [one.step for one in best(shelf, KeepBestSpec(n=9, mode="max"))] == [1, 3, 2]


def test_every_reason_names_the_rules() -> None:
    rules = RemoteTierSpec(keep=1, keep_every=10, keep_best=KeepBestSpec())
    shelf = [Stored(20, 1), Stored(7, 1), Stored(5, 1, complete=False), Stored(10, 1)]
    going = doomed(shelf, rules, current_attempt=2, is_whole=lambda _: True)
    assert [(one.stored.step, one.why) for one in going] == [
        (7, "not among the newest 1, no multiple of 10, not among the best 1 by loss"),
        (5, "attempt 1 left it incomplete"),
    ]
