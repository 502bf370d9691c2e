"""Findings about accelerators, from recorded behaviours of NVML."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pynvml
import pytest
import torch
from tests.support.faults.fake_nvml import LOST, NOT_SUPPORTED, FakeDevice, FakeNvml

from holdfast_workers.agent.health_watch import HealthProbes, HealthWatch
from holdfast_workers.health.evaluator import HealthLimits
from holdfast_workers.health.findings import DeviceReading
from holdfast_workers.health.nvml import Accelerators, NvmlUnavailable
from holdfast_workers.health.xid import XIDS, XidClass
from holdfast_workers.protocol.findings import HealthFinding, Level

LIMITS = HealthLimits()


class Node:
    """A watch over fake devices; the test triggers each check."""

    def __init__(self, *devices: FakeDevice, workers: int = 0) -> None:
        self.nvml = FakeNvml(*devices)
        self.reported: list[tuple[HealthFinding, ...]] = []
        self.workers = workers
        self._probes = HealthProbes((), "", Accelerators(self.nvml, {}))
        self._watch = HealthWatch(
            lambda: self._probes, 5.0, lambda: self.workers, self.reported.append, LIMITS
        )
        self.now = 0.0

    def check(self, after_s: float = 5.0) -> tuple[HealthFinding, ...]:
        """The findings about accelerators, `after_s` later."""
        self.now += after_s
        self._watch.check(self._probes, self.now)
        return tuple(f for f in self._watch.findings if f.probe == "accelerator")


def only(found: tuple[HealthFinding, ...]) -> HealthFinding:
    (single,) = found
    return single


def test_a_healthy_device_gives_no_finding_and_no_report() -> None:
    node = Node(FakeDevice())
    for _ in range(200):
        assert node.check() == ()
    assert not [found for found in node.reported if any(f.probe == "accelerator" for f in found)]


@pytest.mark.parametrize("number", sorted(XIDS))
def test_each_xid_has_the_level_of_its_class(number: int) -> None:
    node = Node(FakeDevice())
    node.nvml.xid(number)
    found = only(node.check())
    kind = XIDS[number].kind
    expected = {
        XidClass.APPLICATION: Level.NOTE,
        XidClass.CONTAINED: Level.SUSPECT,
        XidClass.LINK: Level.SUSPECT,
        XidClass.HARDWARE: Level.UNFIT,
        XidClass.LOST: Level.UNFIT,
    }[kind]
    assert (found.kind, found.code, found.level) == ("xid", number, expected)
    assert found.lost == (kind is XidClass.LOST)
    assert f"XID {number}" in found.what and found.where == "GPU-1"


def test_an_xid_of_a_program_expires_and_an_xid_of_a_device_does_not() -> None:
    node = Node(FakeDevice())
    for number in (31, 48, 9999):
        node.nvml.xid(number)
    assert {f.code for f in node.check()} == {31, 48, 9999}
    assert {f.code for f in node.check(LIMITS.window_s + 1)} == {48}
    assert node.reported[-1][0].code == 48, "the end of a finding is reported too"


def test_only_memory_errors_that_appear_during_the_watch_make_a_node_unfit() -> None:
    node = Node(device := FakeDevice(ecc=3))
    assert only(node.check()).level is Level.NOTE  # these errors are older than the job
    device.ecc = 4
    found = only(node.check())
    assert (found.kind, found.level) == ("ecc", Level.UNFIT)
    assert found.what.startswith("1 uncorrectable")


def test_rows_to_be_remapped_are_suspect_and_a_failed_remapping_is_unfit() -> None:
    node = Node(device := FakeDevice(rows=(1, 1, 1, 0)))
    assert only(node.check()).level is Level.SUSPECT
    device.rows = (1, 1, 0, 1)
    assert only(node.check()).level is Level.UNFIT


@pytest.mark.parametrize(
    ("bits", "kind", "level"),
    [
        (pynvml.nvmlClocksEventReasonHwThermalSlowdown, "hw_thermal", Level.SUSPECT),
        (pynvml.nvmlClocksEventReasonSwThermalSlowdown, "sw_thermal", Level.NOTE),
        (pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown, "power_brake", Level.SUSPECT),
        (pynvml.nvmlClocksEventReasonHwSlowdown, "hw_slowdown", Level.SUSPECT),
        (pynvml.nvmlClocksEventReasonSwPowerCap, "power_cap", Level.NOTE),
    ],
)
def test_throttling_is_reported_by_its_reason(bits: int, kind: str, level: Level) -> None:
    node = Node(FakeDevice(clocks=bits | pynvml.nvmlClocksEventReasonGpuIdle, temperature=91))
    found = only(node.check())
    assert (found.kind, found.level) == (kind, level)
    assert ("91 °C" in found.what) == ("thermal" in kind)


@pytest.mark.parametrize(
    ("kind", "grow"),
    [
        ("nvlink", lambda device, by: device.links[2].__setitem__(0, by)),
        ("pcie", lambda device, by: setattr(device, "pcie", by)),
    ],
)
def test_errors_of_links_are_suspect_when_they_come_fast(
    kind: str, grow: Callable[[FakeDevice, int], None]
) -> None:
    node = Node(device := FakeDevice())
    limit = LIMITS.nvlink_errors if kind == "nvlink" else LIMITS.pcie_replays
    node.check()
    grow(device, limit - 1)
    assert node.check() == ()
    grow(device, limit)
    assert (only(node.check()).kind, node.reported[-1][-1].level) == (kind, Level.SUSPECT)
    assert node.check(LIMITS.window_s + 1) == (), "the errors have stopped"


def test_used_memory_without_a_process_is_a_leak_unless_workers_live() -> None:
    node = Node(device := FakeDevice(used=2 << 30), workers=1)
    assert node.check() == node.check() == ()
    node.workers = 0
    assert only(node.check()).kind == "leak"
    device.processes = ("a process",)
    assert node.check() == ()
    device.processes = NOT_SUPPORTED
    assert node.check() == ()


def test_a_value_that_is_not_measured_is_neither_zero_nor_healthy() -> None:
    unreadable = FakeDevice(
        **dict.fromkeys(("ecc", "rows", "clocks", "temperature", "pcie", "used"), NOT_SUPPORTED),
        processes=NOT_SUPPORTED,
        links=[],
    )
    (read,) = Accelerators(FakeNvml(unreadable), {}).read()
    assert read == DeviceReading("GPU-1")
    assert read.ecc_uncorrected is None and read.nvlink_errors is None
    node = Node(device := FakeDevice(ecc=NOT_SUPPORTED))
    assert node.check() == ()
    device.ecc = 7  # it is not known whether the counter grew
    assert only(node.check()).level is Level.NOTE


def test_a_device_that_the_driver_cannot_reach_is_lost() -> None:
    node = Node(device := FakeDevice(), FakeDevice("GPU-2"))
    node.check()
    device.gone = True
    found = only(node.check())
    assert (found.kind, found.level, found.lost, found.where) == (
        "lost",
        Level.UNFIT,
        True,
        "GPU-1",
    )


def test_a_failing_or_missing_nvml_raises_nvml_unavailable() -> None:
    for failure in (
        pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED),
        pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND),
        OSError("no such library"),
    ):
        with pytest.raises(NvmlUnavailable):
            Accelerators(FakeNvml(fails=failure), {})


def test_a_driver_without_events_is_still_read() -> None:
    nvml = FakeNvml(FakeDevice(ecc=2))
    nvml.supports_events = False
    accelerators = Accelerators(nvml, {})
    assert accelerators.xids(0.0) == ()
    assert accelerators.read()[0].ecc_uncorrected == 2
    accelerators.close()
    assert nvml.open == 0


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        (None, ["GPU-1", "GPU-2"]),
        ("1", ["GPU-2"]),
        ("GPU-1", ["GPU-1"]),
        ("", []),
    ],
)
def test_only_the_visible_devices_are_read(visible: str | None, seen: list[str]) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    accelerators = Accelerators(FakeNvml(FakeDevice(), FakeDevice("GPU-2")), environment)
    assert [reading.device for reading in accelerators.read()] == seen


def test_a_failing_query_loses_only_its_own_value() -> None:
    device = FakeDevice(rows=LOST, ecc=1)
    (read,) = Accelerators(FakeNvml(device), {}).read()
    assert read == replace(read, remap_pending=None, ecc_uncorrected=1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_device_is_read_and_found_healthy() -> None:
    accelerators = Accelerators.of_this_node()
    readings = accelerators.read()
    assert readings and all(reading.device.startswith("GPU-") for reading in readings)
    assert all(reading.memory_total for reading in readings)
    assert accelerators.xids(0.0) == ()
    accelerators.close()


def test_an_injected_xid_is_found_even_on_a_node_without_devices() -> None:
    watch = HealthWatch(
        lambda: HealthProbes((), "", None), 5.0, lambda: 0, lambda _found: None, LIMITS
    )
    watch.inject_xid(79)
    watch.check(HealthProbes((), "", None), time.monotonic())
    (found,) = (finding for finding in watch.findings if finding.kind == "xid")
    assert (found.code, found.lost, found.where) == (79, True, "injected")
