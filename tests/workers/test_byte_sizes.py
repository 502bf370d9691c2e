"""Numbers of bytes as people read them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast_workers.byte_sizes import UNITS, size_of


def test_sizes_are_shown_in_decimal_units() -> None:
    assert [size_of(n) for n in (7, 1500, 2_000_000, 3 * 10**9)] == [
        "7 bytes",
        "1.5 kB",
        "2 MB",
        "3 GB",
    ]


def test_a_size_that_rounds_to_the_next_unit_is_written_in_it() -> None:
    assert size_of(999_499_999) == "999 MB"
    assert size_of(999_500_001) == "1 GB"
    assert size_of(1_234_567 * 10**12) == "1234567 TB"


@given(st.integers(0, 10**20))
def test_a_size_is_right_to_three_digits(nbytes: int) -> None:
    number, unit = size_of(nbytes).split()
    value = float(number) * {"bytes": 1, **dict(UNITS)}[unit]
    assert abs(value - nbytes) <= 0.00501 * nbytes
    assert "e" not in number
