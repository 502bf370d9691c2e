"""Properties of the transition table."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_service.job_model.lifecycle import (
    TERMINAL,
    TRANSITIONS,
    ForbiddenTransition,
    State,
    may,
    require,
    state_after_report,
)
from holdfast_service.job_model.supervisor_protocol import Phase


def test_every_state_is_in_the_table() -> None:
    assert set(TRANSITIONS) == set(State)


@given(st.sampled_from(sorted(TERMINAL)), st.sampled_from(State))
def test_terminal_is_terminal(ended: State, other: State) -> None:
    with pytest.raises(ForbiddenTransition):
        require(ended, other)


@given(st.sampled_from(State))
def test_every_state_can_still_end(state: State) -> None:
    reachable, frontier = {state}, [state]
    while frontier:
        for follower in TRANSITIONS[frontier.pop()] - reachable:
            reachable.add(follower)
            frontier.append(follower)
    assert reachable & TERMINAL


@given(st.sampled_from(State), st.lists(st.sampled_from(Phase), max_size=30))
def test_no_sequence_of_reports_makes_a_forbidden_transition(
    state: State, phases: list[Phase]
) -> None:
    for phase in phases:
        new = state_after_report(state, phase)
        if new is not None:
            assert may(state, new)
            assert not new.terminal  # a phase alone never ends a job
            state = new


@given(st.lists(st.sampled_from(Phase), max_size=30))
def test_a_cancelled_job_never_runs_again(phases: list[Phase]) -> None:
    assert all(state_after_report(State.CANCELLING, phase) is None for phase in phases)


def test_a_job_is_queued_only_before_it_starts_or_after_a_pause() -> None:
    assert {old for old in State if may(old, State.QUEUED)} == {State.PAUSED}
