"""The decision about a save, from what all ranks have."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_workers.program_memory.world_saves import (
    SaveDecision,
    Standing,
    StepsDiffer,
    WorldSave,
    decide,
    newest_whole,
    save_to_load,
)

ATTEMPT = 2
A, B, C, D = (WorldSave(ATTEMPT, number, 10 * number) for number in range(1, 5))


def standing(*complete: WorldSave, held: bool = True, base: WorldSave | None = None) -> Standing:
    """`held`: whether the partners hold what is complete."""
    found = frozenset(complete)
    numbers = (save.number for save in complete)
    return Standing(
        step=50,
        complete=found,
        goes_on_from=base,
        at_partners=found if held else frozenset(),
        has_partner=True,
        last_number=max(numbers, default=0),
    )


def decided(*standings: Standing) -> SaveDecision:
    return decide(standings, ATTEMPT, len(standings))


def test_the_newest_step_of_all_ranks_is_kept_although_some_have_a_newer_one() -> None:
    decision = decided(standing(B, C, base=C), standing(A, B, base=B), standing(B, D, base=D))
    assert decision.keep == B
    assert decision.save == WorldSave(ATTEMPT, 5, 50)
    assert (decision.go, decision.protected) == (True, B.step)


def test_a_program_that_went_back_keeps_the_step_that_it_loaded() -> None:
    back = [standing(A, B, base=A)] * 2
    assert decided(*back).keep == A
    assert decided(back[0], standing(A, B, base=B)).keep == B  # the load failed on a rank


@pytest.mark.parametrize(
    ("late", "goes"),
    [
        (standing(B, C, held=False), True),  # overwrites a step that never became whole
        (standing(A, B, held=False), False),  # overwrites what its partner may have alone
    ],
)
def test_a_save_is_skipped_if_a_lost_node_would_leave_no_step(late: Standing, goes: bool) -> None:
    decision = decided(standing(B), late)
    assert (decision.keep, decision.go, decision.late) == (B, goes, (1,))
    assert decision.protected == -1


def test_one_rank_alone_goes_on_without_its_partner() -> None:
    assert decided(standing(A, B, held=False)).go
    assert decide([standing(A, B, held=False)], ATTEMPT, world_size=2).go


def test_ranks_that_save_different_steps_are_refused() -> None:
    other = Standing(step=60, complete=frozenset())
    with pytest.raises(StepsDiffer, match="saved together: 50 by rank 0, 60 by rank 1"):
        decided(standing(), other)


SAVES = st.frozensets(st.sampled_from([A, B, C, D]), max_size=2)


@given(complete=st.lists(SAVES, min_size=1, max_size=4), held=st.booleans())
def test_what_is_kept_is_whole_and_nothing_newer_is(
    complete: list[frozenset[WorldSave]], held: bool
) -> None:
    decision = decided(*(standing(*saves, held=held) for saves in complete))
    whole = frozenset.intersection(*complete)
    assert decision.keep == max(whole, default=None)
    assert all(decision.save > save for saves in complete for save in saves)


@given(complete=st.lists(SAVES, min_size=2, max_size=4), data=st.data())
def test_a_save_that_breaks_off_anywhere_leaves_what_was_whole(
    complete: list[frozenset[WorldSave]], data: st.DataObject
) -> None:
    """Each rank has done nothing yet, has begun, or has committed."""
    decision = decided(*(standing(*saves) for saves in complete))
    kept = frozenset({decision.keep} if decision.keep is not None else ())
    after = [
        data.draw(st.sampled_from([saves, kept, kept | {decision.save}])) for saves in complete
    ]
    left = newest_whole([standing(*saves) for saves in after])
    if decision.keep is not None:
        assert left is not None
        assert left in (decision.keep, decision.save)
    assert (left == decision.save) == all(decision.save in saves for saves in after)


FIRST, SECOND = WorldSave(ATTEMPT, 1, 10), WorldSave(ATTEMPT, 2, 10)
START = WorldSave(1, 5, 10)


@pytest.mark.parametrize(
    ("at_hand", "loaded"),
    [
        ([{0: {FIRST, SECOND}}, {1: {FIRST}}], FIRST),
        ([{0: {FIRST, SECOND}}, {1: {FIRST, SECOND}}], SECOND),
        ([{}, {}], None),
        # Of three ranks, two have their parts; what the attempt starts from was made by two.
        ([{0: {FIRST, START}}, {1: {FIRST, START}}, {}], START),
        # It was made by more ranks than there are now.
        ([{0: {FIRST, START}, 2: {START}}, {1: {FIRST, START}}], FIRST),
        # Which of the former saves the attempt starts from is not known.
        ([{0: {START, WorldSave(1, 6, 10)}}, {1: {START}}], START),
        # Nothing is known of the other ranks.
        ([{0: {FIRST, START}}], FIRST),
    ],
)
def test_of_several_saves_of_a_step_the_newest_that_is_whole_is_loaded(
    at_hand: list[dict[int, set[WorldSave]]], loaded: WorldSave | None
) -> None:
    assert save_to_load(at_hand, ATTEMPT, max(2, len(at_hand))) == loaded
