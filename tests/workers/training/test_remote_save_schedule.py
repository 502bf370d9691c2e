"""The schedule of saves to the remote tier: the same steps on all ranks, and each in the end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_workers.training.remote_save_schedule import RemoteSaveSchedule


def test_a_save_that_meets_another_is_made_up_for_once_no_rank_saves() -> None:
    schedule = RemoteSaveSchedule()
    saving = {5, 6, 7}
    due = [s for s in range(1, 11) if schedule.is_due(s, 4, saving=s in saving, last=False)]
    assert due == [4, 8]
    schedule = RemoteSaveSchedule()
    saving = {3, 4, 5}
    due = [s for s in range(1, 11) if schedule.is_due(s, 2, saving=s in saving, last=False)]
    assert due == [2, 6, 8, 10]


def test_the_last_step_waits_for_no_save_and_the_interval_zero_saves_only_it() -> None:
    schedule = RemoteSaveSchedule()
    assert not schedule.is_due(4, 0, saving=False, last=False)
    assert schedule.is_due(5, 0, saving=True, last=True)
    assert RemoteSaveSchedule().is_due(5, 2, saving=True, last=True)


def test_a_save_is_made_up_for_at_a_step_that_has_what_it_is_chosen_by() -> None:
    """Every step that is saved is then an evaluated one."""
    schedule, saving = RemoteSaveSchedule(), {8, 9, 10}
    due = [
        step
        for step in range(1, 18)
        if schedule.is_due(step, 8, saving=step in saving, last=False, makes_up=step % 4 == 0)
    ]
    assert due == [12, 16]


@pytest.mark.seconds
@given(
    every=st.integers(1, 6),
    durations=st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=8), min_size=40),
)
def test_every_save_that_begins_is_completed_by_all_ranks(
    every: int, durations: list[list[int]]
) -> None:
    """Ranks save at very different speeds; no rank is ever asked to save while any rank saves."""
    schedule = RemoteSaveSchedule()
    busy_until, wanted_since = 0, None
    for step in range(1, len(durations)):
        saving = step < busy_until
        is_due = schedule.is_due(step, every, saving=saving, last=False)
        if step % every == 0 and wanted_since is None:
            wanted_since = step
        assert is_due == (wanted_since is not None and not saving)
        if is_due:
            busy_until = step + max(durations[step])
            wanted_since = None
