"""The evaluator on readings of every kind: what counts, what does not, and what is never said."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_workers.health.evaluator import MIB, HealthLimits, changed, evaluate
from holdfast_workers.health.findings import (
    DeviceReading,
    DiskReading,
    Finding,
    HostReading,
    Level,
    NetworkReading,
    Observed,
    Xid,
)

LIMITS = HealthLimits()
NUMBER = st.none() | st.integers(0, 10**12)


def kinds(host: HostReading, before: HostReading | None = None) -> set[str]:
    found = evaluate(Observed(0.0, host=before or host), Observed(5.0, host=host), (), LIMITS)
    return {one.kind for one in found}


def test_a_machine_that_is_short_of_something_is_suspect() -> None:
    assert kinds(HostReading(stalled_share=0.3)) == {"memory_pressure"}
    assert kinds(HostReading(memory_available=1, memory_total=1000)) == {"memory"}
    assert kinds(HostReading(handles=(95, 100))) == {"handles"}
    full = DiskReading("/cache", 10 * MIB, 100_000 * MIB)
    assert kinds(HostReading(disks=(full,))) == {"disk"}


def test_a_small_disk_is_not_full_because_it_is_small() -> None:
    small = DiskReading("/dev/shm", 32 * MIB, 64 * MIB)
    large = DiskReading("/data", 50_000 * MIB, 10_000_000 * MIB)  # 0.5% of it, and plenty
    assert kinds(HostReading(disks=(small, large))) == set()


def test_a_clock_that_was_set_and_new_io_errors_are_told() -> None:
    before = HostReading(clock_offset_s=100.0, io_errors=5)
    assert kinds(before, before) == set()
    assert kinds(HostReading(clock_offset_s=70.0, io_errors=5), before) == {"clock"}
    assert kinds(HostReading(clock_offset_s=100.1, io_errors=6), before) == {"io"}


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (NetworkReading("eth0", True, 10, 10**6), set()),
        (NetworkReading("eth0", False, 10, 10**6), {"link"}),
        (NetworkReading("eth0", True, 5010, 10**6), {"errors"}),
        (NetworkReading("eth0", True, 60, 10**3), set()),  # too few to tell
        (NetworkReading("eth0", None, None, None), set()),
    ],
)
def test_the_network_is_judged_by_its_link_and_its_share_of_bad_packets(
    now: NetworkReading, expected: set[str]
) -> None:
    before = Observed(0.0, network=NetworkReading("eth0", True, 10, 0))
    found = evaluate(before, Observed(5.0, network=now), (), LIMITS)
    assert {one.kind for one in found} == expected
    assert all(one.level is Level.SUSPECT for one in found)


def test_a_counter_that_was_reset_counts_from_zero() -> None:
    before = Observed(0.0, devices=(DeviceReading("d", ecc_uncorrected=9),))
    after = Observed(5.0, devices=(DeviceReading("d", ecc_uncorrected=2),))
    (found,) = evaluate(before, after, (), LIMITS)
    assert found.what.startswith("2 ")


def test_numbers_alone_are_nothing_new_to_tell() -> None:
    finding = Finding("host", "disk", Level.SUSPECT, "5 MiB are left", "/x")
    assert not changed([finding], [replace(finding, what="4 MiB are left")])
    assert changed([finding], [replace(finding, level=Level.UNFIT)])
    assert changed([finding], [])


devices = st.builds(
    DeviceReading,
    st.just("d"),
    st.just(False),
    NUMBER,
    st.none() | st.booleans(),
    st.none() | st.booleans(),
    st.none() | st.frozensets(st.sampled_from(["power_cap", "hw_thermal", "power_brake"])),
    st.none() | st.integers(0, 120),
    NUMBER,
    NUMBER,
    NUMBER,
    NUMBER,
    st.none() | st.integers(0, 4),
)


@given(devices, devices, st.integers(0, 3))
def test_hiding_a_value_never_makes_a_finding(
    before: DeviceReading, now: DeviceReading, workers: int
) -> None:
    def found(first: DeviceReading, second: DeviceReading) -> set[tuple[str, Level]]:
        judged = evaluate(
            Observed(0.0, devices=(first,)),
            Observed(5.0, devices=(second,), workers=workers),
            (),
            LIMITS,
        )
        return {(one.kind, one.level) for one in judged}

    all_found = found(before, now)
    for name in (one.name for one in fields(DeviceReading)[2:]):
        hidden = found(replace(before, **{name: None}), replace(now, **{name: None}))
        milder = {(kind, level) for kind, level in hidden if kind == "row_remap"}
        assert hidden - milder <= all_found, name
    nothing = DeviceReading("d")
    assert found(nothing, nothing) == set()


@given(st.lists(st.builds(Xid, st.just("d"), st.integers(0, 200), st.floats(0, 2000))))
def test_a_node_is_given_up_for_xids_known_to_be_its_devices_fault_alone(xids: list[Xid]) -> None:
    found = evaluate(Observed(2000.0), Observed(2000.0), xids, LIMITS)
    unfit = {one.code for one in found if one.level is Level.UNFIT}
    assert unfit == {one.number for one in xids} & {48, 61, 62, 64, 79, 95, 119, 120, 140, 143}
    assert {one.code for one in found if one.lost} <= {79}
    assert len({one.key for one in found}) == len(found)
