"""What the reaper decides."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast_service.job_model.lifecycle import State
from holdfast_service.reconcile.reaper import Standing, judge

names = st.sampled_from("abcdef")


@given(
    st.sets(names),
    st.dictionaries(names, st.builds(Standing, st.sampled_from(State), st.booleans())),
    st.sets(names),
)
def test_only_the_dead_and_the_twice_unknown_are_released(
    present: set[str], known: dict[str, Standing], suspects: set[str]
) -> None:
    verdict = judge(present, known, suspects)
    for job in verdict.doomed:
        assert job in present
        if job in known:
            assert known[job].state.terminal
            assert known[job].cleaned
        else:
            assert job in suspects
    assert verdict.suspects <= present - known.keys()
    # Whoever is still unknown next time goes then.
    again = judge(present, known, verdict.suspects)
    assert present - known.keys() <= verdict.doomed | again.doomed
