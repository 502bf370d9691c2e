"""Device time is shown in the unit that fits, without loss of what it says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_service.wording import device_share, device_time, plural, shortened

SECONDS_IN = {"device-seconds": 1.0, "device-hours": 3600.0}


@given(st.floats(0.0, 1e9))
def test_device_time_is_rounded_only_in_its_last_digit(seconds: float) -> None:
    number, unit = device_time(seconds).split()
    value = float(number.replace(",", ""))
    last_digit = (
        0.005 if unit == "device-hours" else 0.05 if seconds < 10 else 0.5
    )  # finer below 0.1
    assert value == pytest.approx(seconds / SECONDS_IN[unit], abs=1.01 * last_digit)
    assert (unit == "device-hours") is (seconds >= 3600.0)


@given(st.floats(1e-6, 1e6), st.floats(1.0, 100.0))
def test_a_part_of_device_time_is_never_shown_as_nothing(part_s: float, times: float) -> None:
    part, _, whole = device_share(part_s, part_s * times).partition(" of ")
    assert whole == device_time(part_s * times)
    assert float(part.split()[0].replace(",", "")) > 0.0


def test_device_time_and_plurals_read_well() -> None:
    assert device_time(11161.9) == "3.10 device-hours"
    assert device_share(1.1, 108.0) == "1.1 of 108 device-seconds"
    assert device_share(0.0, 7200.0) == "0.0 device-seconds of 2.00 device-hours"
    assert [plural(n, "copy", "copies") for n in (1, 2)] == ["1 copy", "2 copies"]
    assert [plural(n, "CPU") for n in (0.5, 1.0, 2.0)] == ["0.5 CPUs", "1 CPU", "2 CPUs"]
    assert plural(2_000_000, "step") == "2000000 steps"


def test_a_long_list_is_shortened_to_its_first_items() -> None:
    assert shortened(["n0", "n1"]) == "n0, n1"
    assert shortened(range(64), 3) == "0, 1, 2, ... (64 in all)"
