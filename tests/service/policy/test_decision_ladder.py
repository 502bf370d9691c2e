"""The decision ladder: one action for every situation, with reasons for it and against others."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast_service.policy.causes import Cause
from holdfast_service.policy.decision_ladder import (
    DATA_OUTAGE_S,
    Action,
    Budget,
    Decision,
    SeatingResult,
    Situation,
    applied_decision,
    decide,
    is_tolerable,
)
from holdfast_workers.protocol.messages import ErrorKind, ErrorReport

ERROR = ErrorReport(ErrorKind.USER, "ValueError", "no", "Traceback", 10)

SITUATIONS = st.builds(
    Situation,
    cause=st.sampled_from(Cause),
    what=st.just("rank 1 is gone"),
    step=st.none() | st.integers(0, 9),
    error=st.sampled_from((None, ERROR)),
    named=st.booleans(),
    times=st.integers(0, 4),
    repeated=st.booleans(),
    room=st.booleans(),
    smaller=st.booleans(),
    may_roll_back=st.booleans(),
    data_outage_s=st.sampled_from((0.0, DATA_OUTAGE_S)),
    budget=st.builds(
        Budget,
        failures=st.integers(0, 6),
        max_failures=st.integers(0, 5),
        preemptions=st.integers(0, 6),
        max_preemptions=st.integers(0, 5),
        without_progress=st.integers(0, 6),
        max_without_progress=st.integers(0, 5),
    ),
)


def decision(cause: Cause, **known: object) -> Decision:
    return decide(Situation(cause, what="rank 1", **known))  # type: ignore[arg-type]


@pytest.mark.seconds
@given(SITUATIONS)
@settings(max_examples=2000)
def test_every_situation_has_one_decision_with_a_reason_for_and_against_each_action(
    now: Situation,
) -> None:
    found = decide(now)
    assert found.reason
    assert {other.action for other in found.refused} == set(Action) - {found.action}
    assert all(other.why for other in found.refused)
    assert (found.action is Action.STOP) == (found.end is not None)
    if found.end is not None:
        assert found.end.code
        assert found.end.message == found.reason
    if found.action is Action.SHRINK:
        assert now.smaller and not now.room
    assert (found.action is Action.GROW) == (now.cause is Cause.RESIZE)
    if found.action is Action.IGNORE:
        assert is_tolerable(now.cause)
    if found.action is Action.REPLACE_NODE:
        assert now.room
    if found.action not in (Action.STOP, Action.IGNORE, Action.GROW):
        assert now.budget.failures <= now.budget.max_failures
        assert now.budget.without_progress <= now.budget.max_without_progress


@given(SITUATIONS)
@settings(max_examples=500)
def test_more_budget_and_a_ready_node_never_end_a_job(now: Situation) -> None:
    richer = Situation(**{**now.__dict__, "room": True, "budget": Budget()})
    if decide(now).action is not Action.STOP:
        assert decide(richer).action is not Action.STOP


def test_a_user_error_is_retried_once_and_then_ends_the_job() -> None:
    assert decision(Cause.USER_ERROR, error=ERROR).action is Action.REFORM
    again = decision(Cause.USER_ERROR, error=ERROR, repeated=True, room=True)
    assert again.end is not None
    assert (again.end.code, again.end.traceback) == ("user_error", "Traceback")


def test_data_that_is_away_is_waited_for_and_ends_the_job_only_after_hours() -> None:
    for outage_s in (0.0, 600.0, DATA_OUTAGE_S - 1):
        found = decision(Cause.DATA_UNAVAILABLE, error=ERROR, data_outage_s=outage_s)
        assert found.action is Action.REFORM
    end = decision(Cause.DATA_UNAVAILABLE, error=ERROR, data_outage_s=DATA_OUTAGE_S).end
    assert end is not None and end.code == "data_unavailable"
    assert end.message == (
        "14400 s without data and without a step, 14400 s allowed; the last: rank 1"
    )
    crash = decision(Cause.WORKER_CRASH, data_outage_s=DATA_OUTAGE_S)
    assert crash.end is None, "an outage does not explain it"


def test_a_missing_module_ends_the_job_with_what_to_do() -> None:
    error = replace(ERROR, type="ModuleNotFoundError", message="No module named 'x'")
    found = decision(Cause.USER_ERROR, error=error, repeated=True)
    assert found.end is not None
    assert found.end.message.startswith("No module named 'x': give the job its package, with")
    assert "twice" not in found.end.message and "--pip" in found.end.message


@pytest.mark.parametrize("cause", [Cause.USER_ERROR, Cause.OUT_OF_MEMORY, Cause.WORKER_CRASH])
def test_the_end_for_a_repeated_error_names_a_step_only_if_one_is_known(cause: Cause) -> None:
    error = ERROR if cause is Cause.USER_ERROR else None
    known = decision(cause, error=error, repeated=True, step=0).end
    unknown = decision(cause, error=error, repeated=True, step=None).end
    assert known is not None and "at step 0" in known.message
    assert unknown is not None and "twice" in unknown.message
    assert "at step" not in unknown.message and "with no step between: " in unknown.message


def test_out_of_memory_twice_at_a_step_ends_the_job_with_its_own_code() -> None:
    assert decision(Cause.OUT_OF_MEMORY).action is Action.REPLACE_WORKER
    again = decision(Cause.OUT_OF_MEMORY, repeated=True, room=True)
    assert again.end is not None
    assert again.end.code == "out_of_memory"


def test_a_node_at_fault_twice_is_replaced_if_another_is_ready() -> None:
    for cause in (Cause.HANG, Cause.WORKER_CRASH):
        assert decision(cause, times=1, room=True).action is Action.REPLACE_WORKER
        assert decision(cause, times=2, room=True).action is Action.REPLACE_NODE
        assert decision(cause, times=2, room=False).action is Action.REPLACE_WORKER


def test_a_node_that_still_makes_steps_is_replaced_only_if_another_is_ready() -> None:
    for cause in (Cause.STRAGGLER, Cause.NODE_UNWELL, Cause.PREEMPTED):
        assert decision(cause, named=False, room=True).action is Action.REPLACE_NODE
        assert decision(cause, named=False, room=False).action is Action.IGNORE


def test_a_node_that_computes_wrong_bits_is_left_at_once_and_a_repeat_ends_the_job() -> None:
    assert decision(Cause.CORRUPTION, room=True).action is Action.REPLACE_NODE
    assert decision(Cause.CORRUPTION).action is Action.REPLACE_WORKER
    assert decision(Cause.CORRUPTION, times=2).action is Action.STOP


def test_a_lost_node_is_replaced_or_waited_for() -> None:
    assert decision(Cause.NODE_LOST, room=True).action is Action.REPLACE_NODE
    assert decision(Cause.NODE_LOST).action is Action.WAIT


def test_a_process_ended_from_outside_is_replaced_on_the_same_node() -> None:
    taken = decision(Cause.PREEMPTED, named=True, times=0, room=True)
    assert taken.action is Action.REPLACE_WORKER


def test_a_guard_rolls_back_while_it_is_allowed_to() -> None:
    assert decision(Cause.GUARD, may_roll_back=True).action is Action.ROLL_BACK
    assert decision(Cause.GUARD).action is Action.STOP


def test_an_exceeded_budget_ends_the_job_with_a_named_code() -> None:
    ends = [
        decision(Cause.WORKER_CRASH, budget=budget).end
        for budget in (
            Budget(failures=4, max_failures=3),
            Budget(preemptions=4, max_preemptions=3),
            Budget(without_progress=6),
        )
    ]
    assert [end.code if end else None for end in ends] == [
        "too_many_failures",
        "too_many_preemptions",
        "no_progress",
    ]


def test_the_fence_result_amends_the_decision_and_keeps_the_original_one() -> None:
    original = decision(Cause.COMMUNICATION)
    same = applied_decision(original, SeatingResult())
    assert same.action is Action.REFORM
    changed = applied_decision(original, SeatingResult(forked=(1,)))
    assert changed.action is Action.REPLACE_WORKER
    assert {refusal.action for refusal in changed.refused} == set(Action) - {Action.REPLACE_WORKER}
    (refused,) = [refusal.why for refusal in changed.refused if refusal.action is Action.REFORM]
    assert "decided at first" in refused
