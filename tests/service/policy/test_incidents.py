"""The record of an incident: its phases add up to its total."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast_service.policy.causes import Cause, Fault
from holdfast_service.policy.incidents import PHASES, Incident

NOW = 1_000_000.0
SECONDS = st.floats(0.0, 1e4, allow_nan=False)


@given(
    seen_s=st.floats(-5.0, 100.0),
    phases=st.lists(st.tuples(st.sampled_from(PHASES[:-1]), SECONDS), max_size=20),
    rest_s=SECONDS,
)
def test_the_phases_add_up_to_the_time_from_the_first_signal_to_the_end(
    seen_s: float, phases: list[tuple[str, float]], rest_s: float
) -> None:
    now = NOW
    incident = Incident.opened(1, Fault(Cause.HANG, 1, now - seen_s, "stuck"), now)
    for phase, taken_s in phases:
        now += taken_s
        incident = incident.with_phase(phase, now)
    closed = incident.closed(now + rest_s, "first_step", "runs again")
    total_s = closed.phases_s["total"]
    assert abs(total_s - (now + rest_s - closed.signalled_at)) < 1e-3
    assert abs(total_s - (sum(closed.phases_s.values()) - total_s)) < 1e-3


def test_a_clock_that_steps_back_makes_no_phase_negative() -> None:
    incident = Incident.opened(1, Fault(Cause.HANG, 1, NOW - 1, "stuck"), NOW)
    closed = incident.with_phase("fence", NOW - 60).closed(NOW - 50, "form", "runs again")
    assert closed.phases_s == {"detect": 1.0, "total": 1.0}
