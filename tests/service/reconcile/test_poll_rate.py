"""The rate of supervisor polls."""

from __future__ import annotations

import pytest

from holdfast_service.reconcile.poll_rate import PollRate


def test_polls_start_one_after_the_other() -> None:
    rate = PollRate(10.0)
    assert [rate.reserve(5.0) for _ in range(3)] == pytest.approx([0.0, 0.1, 0.2])
    assert rate.reserve(9.0) == 0.0  # unused capacity is not made up for


def test_a_busy_or_late_server_polls_less_and_never_stops() -> None:
    for busy_share, late_s in ((0.9, 0.0), (0.1, 0.5)):
        rate = PollRate(10.0)
        before = rate.per_s
        rate.adjust(busy_share, late_s)
        assert rate.per_s < before
        for _ in range(100):
            rate.adjust(busy_share, late_s)
        assert 1.0 <= rate.per_s < 5.0


def test_an_idle_server_polls_as_fast_as_is_allowed() -> None:
    rate = PollRate(10.0)
    for _ in range(20):
        rate.adjust(0.9, 0.5)
    for _ in range(40):
        rate.adjust(0.1, 0.0)
    assert rate.per_s == 10.0
