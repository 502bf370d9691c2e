"""The retention rules, over arbitrary lists of stored checkpoints."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from holdfast_workers.checkpoint.retention_rules import (
    StoredCheckpoint,
    best_checkpoints,
    checkpoints_to_remove,
)
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
    StoredCheckpoint,
    step=st.integers(1, 12),
    attempt=st.integers(1, 3),
    complete=st.booleans(),
    metrics=METRICS,
    pinned=st.booleans(),
    needed=st.booleans(),
)
STORED_LISTS = st.lists(STORED, max_size=12, unique_by=lambda checkpoint: checkpoint.age)


def _removed_ages(
    stored: list[StoredCheckpoint],
    rules: RemoteTierSpec,
    bad: set[tuple[int, int]],
    attempt: int = 1,
) -> set[tuple[int, int]]:
    removals = checkpoints_to_remove(
        stored,
        rules,
        current_attempt=attempt,
        is_whole=lambda checkpoint: checkpoint.age not in bad,
    )
    return {removal.checkpoint.age for removal in removals}


def _complete(stored: list[StoredCheckpoint]) -> list[StoredCheckpoint]:
    """The complete checkpoints, newest first."""
    complete = [checkpoint for checkpoint in stored if checkpoint.complete]
    return sorted(complete, key=lambda checkpoint: checkpoint.age, reverse=True)


@given(STORED_LISTS, RULES, st.integers(0, 12), st.integers(1, 3))
def test_protected_checkpoints_are_never_removed(
    stored: list[StoredCheckpoint], rules: RemoteTierSpec, damaged: int, attempt: int
) -> None:
    complete = _complete(stored)
    bad = {checkpoint.age for checkpoint in complete[:damaged]}  # the newest ones
    removed = _removed_ages(stored, rules, bad, attempt)
    for checkpoint in stored:
        if checkpoint.complete and (checkpoint.pinned or checkpoint.needed):
            assert checkpoint.age not in removed
        if not checkpoint.complete and checkpoint.attempt == attempt:
            assert checkpoint.age not in removed
    whole = [checkpoint.age for checkpoint in complete if checkpoint.age not in bad]
    assert not whole or whole[0] not in removed
    assert not removed & {checkpoint.age for checkpoint in complete[: rules.keep]}
    if rules.keep_every is not None:
        assert not [
            step
            for step, _ in removed & {checkpoint.age for checkpoint in complete}
            if step % rules.keep_every == 0
        ]
    if rules.keep_best is not None:
        best = best_checkpoints(complete, rules.keep_best)
        assert not removed & {checkpoint.age for checkpoint in best}
    if not complete:
        assert not removed


@given(STORED_LISTS, RULES)
def test_unkept_checkpoints_are_removed_in_one_pass(
    stored: list[StoredCheckpoint], rules: RemoteTierSpec
) -> None:
    removed = _removed_ages(stored, rules, set())
    complete = _complete(stored)
    plain = rules.model_copy(update={"keep_every": None, "keep_best": None})
    unmarked = {
        checkpoint.age
        for checkpoint in complete[rules.keep :]
        if not (checkpoint.pinned or checkpoint.needed)
    }
    assert _removed_ages(complete, plain, set()) == unmarked
    remaining = [checkpoint for checkpoint in stored if checkpoint.age not in removed]
    assert _removed_ages(remaining, rules, set()) == set()


@given(STORED_LISTS, RULES)
def test_checkpoints_are_verified_only_before_a_complete_one_is_removed(
    stored: list[StoredCheckpoint], rules: RemoteTierSpec
) -> None:
    verified: list[tuple[int, int]] = []

    def is_whole(checkpoint: StoredCheckpoint) -> bool:
        verified.append(checkpoint.age)
        return True

    removed = checkpoints_to_remove(stored, rules, current_attempt=1, is_whole=is_whole)
    assert len(verified) <= 1
    if any(removal.checkpoint.complete for removal in removed):
        assert verified == [_complete(stored)[0].age]


def test_best_checkpoints_are_ordered_by_value_then_by_age() -> None:
    stored = [
        StoredCheckpoint(1, 1, metrics={"loss": 1.0}),
        StoredCheckpoint(2, 1, metrics={"loss": 0.5}),
        StoredCheckpoint(3, 1, metrics={"loss": 0.5}),
        StoredCheckpoint(4, 1, metrics={"loss": math.nan}),
        StoredCheckpoint(5, 1),
    ]

    def best_steps(rule: KeepBestSpec) -> list[int]:
        return [checkpoint.step for checkpoint in best_checkpoints(stored, rule)]

    assert best_steps(KeepBestSpec(n=2)) == [3, 2]
    assert best_steps(KeepBestSpec(n=9, mode="max")) == [1, 3, 2]


def test_every_reason_names_the_rules() -> None:
    rules = RemoteTierSpec(keep=1, keep_every=10, keep_best=KeepBestSpec())
    stored = [
        StoredCheckpoint(20, 1),
        StoredCheckpoint(7, 1),
        StoredCheckpoint(5, 1, complete=False),
        StoredCheckpoint(10, 1),
    ]
    removed = checkpoints_to_remove(stored, rules, current_attempt=2, is_whole=lambda _: True)
    assert [(removal.checkpoint.step, removal.reason) for removal in removed] == [
        (7, "not among the newest 1, no multiple of 10, not among the best 1 by loss"),
        (5, "attempt 1 left it incomplete"),
    ]
