"""The reaper's selection of jobs to release."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast_service.job_model.lifecycle import State
from holdfast_service.reconcile.reaper import StoredJobState, plan_sweep

names = st.sampled_from("abcdef")


@given(
    st.sets(names),
    st.dictionaries(names, st.builds(StoredJobState, st.sampled_from(State), st.booleans())),
    st.sets(names),
    st.booleans(),
)
def test_only_cleaned_jobs_are_released_and_twice_unknown_ones_if_the_operator_says_so(
    present: set[str], known: dict[str, StoredJobState], suspects: set[str], release_unknown: bool
) -> None:
    plan = plan_sweep(present, known, suspects, release_unknown)
    for job in plan.to_release:
        assert job in present
        if job in known:
            assert known[job].state.terminal
            assert known[job].cleaned
        else:
            assert release_unknown
            assert job in suspects
    assert plan.unknown == present - known.keys() - plan.to_release
    # Then a job that is still unknown at the next sweep is released.
    again = plan_sweep(present, known, plan.unknown, release_unknown)
    assert (present - known.keys() <= plan.to_release | again.to_release) or not release_unknown
