"""The evaluator on readings of every kind: values that give findings, and values that never do."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_workers.health.evaluator import MIB, HealthLimits, changed, evaluate
from holdfast_workers.health.findings import (
    DeviceReading,
    DiskReading,
    HealthSnapshot,
    HostReading,
    NetworkReading,
    Xid,
)
from holdfast_workers.protocol.findings import HealthFinding, Level

LIMITS = HealthLimits()
NUMBER = st.none() | st.integers(0, 10**12)


def kinds(host: HostReading, before: HostReading | None = None) -> set[str]:
    found = evaluate(
        HealthSnapshot(0.0, host=before or host), HealthSnapshot(5.0, host=host), (), LIMITS
    )
    return {finding.kind for finding in found}


def test_a_machine_that_runs_out_of_a_resource_is_suspect() -> None:
    assert kinds(HostReading(stalled_share=0.3)) == {"memory_pressure"}
    assert kinds(HostReading(memory_available=1, memory_total=1000)) == {"memory"}
    assert kinds(HostReading(handles=(95, 100))) == {"handles"}
    full = DiskReading("/cache", 10 * MIB, 100_000 * MIB)
    assert kinds(HostReading(disks=(full,))) == {"disk"}


def test_a_small_disk_does_not_count_as_full() -> None:
    small = DiskReading("/dev/shm", 32 * MIB, 64 * MIB)
    large = DiskReading("/data", 50_000 * MIB, 10_000_000 * MIB)  # only 0.5%, but enough bytes
    assert kinds(HostReading(disks=(small, large))) == set()


def test_a_clock_jump_and_new_io_errors_are_findings() -> None:
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
        (NetworkReading("eth0", True, 60, 10**3), set()),  # too few errors
        (NetworkReading("eth0", None, None, None), set()),
    ],
)
def test_network_findings_are_a_link_that_is_down_and_many_bad_packets(
    now: NetworkReading, expected: set[str]
) -> None:
    before = HealthSnapshot(0.0, network=NetworkReading("eth0", True, 10, 0))
    found = evaluate(before, HealthSnapshot(5.0, network=now), (), LIMITS)
    assert {finding.kind for finding in found} == expected
    assert all(finding.level is Level.SUSPECT for finding in found)


def test_a_counter_that_was_reset_counts_from_zero() -> None:
    before = HealthSnapshot(0.0, devices=(DeviceReading("d", ecc_uncorrected=9),))
    after = HealthSnapshot(5.0, devices=(DeviceReading("d", ecc_uncorrected=2),))
    (found,) = evaluate(before, after, (), LIMITS)
    assert found.what.startswith("2 ")


def test_findings_that_differ_only_in_numbers_are_unchanged() -> None:
    finding = HealthFinding("host", "disk", Level.SUSPECT, "5 MiB are left", "/x")
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
def test_a_missing_value_never_adds_a_finding(
    before: DeviceReading, now: DeviceReading, workers: int
) -> None:
    def found(first: DeviceReading, second: DeviceReading) -> set[tuple[str, Level]]:
        findings = evaluate(
            HealthSnapshot(0.0, devices=(first,)),
            HealthSnapshot(5.0, devices=(second,), workers=workers),
            (),
            LIMITS,
        )
        return {(finding.kind, finding.level) for finding in findings}

    all_found = found(before, now)
    for name in (field.name for field in fields(DeviceReading)[2:]):
        missing: dict[str, Any] = {name: None}
        hidden = found(replace(before, **missing), replace(now, **missing))
        milder = {(kind, level) for kind, level in hidden if kind == "row_remap"}
        assert hidden - milder <= all_found, name
    nothing = DeviceReading("d")
    assert found(nothing, nothing) == set()


@given(st.lists(st.builds(Xid, st.just("d"), st.integers(0, 200), st.floats(0, 2000))))
def test_only_xids_of_faulty_devices_make_a_node_unfit(xids: list[Xid]) -> None:
    found = evaluate(HealthSnapshot(2000.0), HealthSnapshot(2000.0), xids, LIMITS)
    unfit = {finding.code for finding in found if finding.level is Level.UNFIT}
    assert unfit == {xid.number for xid in xids} & {48, 61, 62, 64, 79, 95, 119, 120, 140, 143}
    assert {finding.code for finding in found if finding.lost} <= {79}
    assert len({finding.key for finding in found}) == len(found)
