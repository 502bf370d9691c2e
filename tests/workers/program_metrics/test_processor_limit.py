"""A computation ends at its limit, and leaves no timer behind."""

from __future__ import annotations

import re
import signal
import threading

import pytest

from holdfast_workers.program_metrics import processor_limit
from holdfast_workers.program_metrics.processor_limit import TookTooLong

LIMIT_S = 0.1


@pytest.mark.parametrize(
    "pattern",
    [
        r".*.*.*.*(?P<loss>\d)$",
        r"\S+\S+\S+\S+(?P<lr>x)",
        r".*?.*?.*?.*?(?P<lr>\S) end",
        r"(?P<lr>x)?a{0,99}a{0,99}a{0,99}a{0,99}z",
        r"(?:a{1,90}){1,90}(?P<lr>x)",
    ],
)
def test_a_search_of_hours_ends_at_its_limit(pattern: str) -> None:
    before = signal.getsignal(signal.SIGVTALRM)
    with pytest.raises(TookTooLong, match=r"more than 0\.1 s"):
        processor_limit.call(lambda: re.compile(pattern).search("a" * 300), LIMIT_S)
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGVTALRM) == before


def test_results_and_errors_pass_and_no_timer_stays() -> None:
    assert processor_limit.call(lambda: 7, LIMIT_S) == 7
    with pytest.raises(ZeroDivisionError):
        processor_limit.call(lambda: 1 / 0, LIMIT_S)
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


def test_another_thread_has_no_limit() -> None:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(processor_limit.call(lambda: 7, LIMIT_S)))
    thread.start()
    thread.join(60)
    assert found == [7]
