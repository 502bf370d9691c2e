"""What is found of accelerators, from recorded behaviours of their library to findings."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pynvml
import pytest
import torch
from tests.support.faults.fake_nvml import LOST, NOT_SUPPORTED, FakeDevice, FakeNvml

from holdfast_workers.agent.health_watch import HealthWatch, Probes
from holdfast_workers.health.evaluator import HealthLimits
from holdfast_workers.health.findings import DeviceReading, Finding, Level
from holdfast_workers.health.nvml import Accelerators, NoLibrary
from holdfast_workers.health.xid import XIDS, XidClass

LIMITS = HealthLimits()


class Node:
    """A watch over fake devices, looked through as often as wanted."""

    def __init__(self, *devices: FakeDevice, workers: int = 0) -> None:
        self.nvml = FakeNvml(*devices)
        self.told: list[tuple[Finding, ...]] = []
        self.workers = workers
        self._probes = Probes((), "", Accelerators(self.nvml, {}))
        self._watch = HealthWatch(
            lambda: self._probes, 5.0, lambda: self.workers, self.told.append, LIMITS
        )
        self.now = 0.0

    def look(self, after_s: float = 5.0) -> tuple[Finding, ...]:
        """The findings about accelerators, after some more seconds."""
        self.now += after_s
        self._watch.look(self._probes, self.now)
        return tuple(one for one in self._watch.findings if one.probe == "accelerator")


def one(found: tuple[Finding, ...]) -> Finding:
    (single,) = found
    return single


def test_a_healthy_device_gives_no_finding_and_nothing_to_tell() -> None:
    node = Node(FakeDevice())
    for _ in range(200):
        assert node.look() == ()
    assert not [found for found in node.told if any(f.probe == "accelerator" for f in found)]


@pytest.mark.parametrize("number", sorted(XIDS))
def test_each_xid_has_the_level_of_its_class(number: int) -> None:
    node = Node(FakeDevice())
    node.nvml.xid(number)
    found = one(node.look())
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


def test_a_programs_xid_is_forgotten_and_a_devices_is_not() -> None:
    node = Node(FakeDevice())
    for number in (31, 48, 9999):
        node.nvml.xid(number)
    assert {f.code for f in node.look()} == {31, 48, 9999}
    assert {f.code for f in node.look(LIMITS.window_s + 1)} == {48}
    assert node.told[-1][0].code == 48, "its end is told too"


def test_memory_errors_count_by_what_they_grew_while_somebody_looked() -> None:
    node = Node(device := FakeDevice(ecc=3))
    assert one(node.look()).level is Level.NOTE  # they are older than the job
    device.ecc = 4
    found = one(node.look())
    assert (found.kind, found.level) == ("ecc", Level.UNFIT)
    assert found.what.startswith("1 uncorrectable")


def test_rows_to_be_remapped_are_suspect_and_a_failed_remapping_is_unfit() -> None:
    node = Node(device := FakeDevice(rows=(1, 1, 1, 0)))
    assert one(node.look()).level is Level.SUSPECT
    device.rows = (1, 1, 0, 1)
    assert one(node.look()).level is Level.UNFIT


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
def test_throttling_is_told_by_its_reason(bits: int, kind: str, level: Level) -> None:
    node = Node(FakeDevice(clocks=bits | pynvml.nvmlClocksEventReasonGpuIdle, temperature=91))
    found = one(node.look())
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
    node.look()
    grow(device, limit - 1)
    assert node.look() == ()
    grow(device, limit)
    assert (one(node.look()).kind, node.told[-1][-1].level) == (kind, Level.SUSPECT)
    assert node.look(LIMITS.window_s + 1) == (), "they have stopped"


def test_memory_that_nobody_uses_has_leaked_unless_a_worker_may_hide() -> None:
    node = Node(device := FakeDevice(used=2 << 30), workers=1)
    assert node.look() == node.look() == ()
    node.workers = 0
    assert one(node.look()).kind == "leak"
    device.processes = ("somebody",)
    assert node.look() == ()
    device.processes = NOT_SUPPORTED
    assert node.look() == ()


def test_what_is_not_measured_is_neither_zero_nor_healthy() -> None:
    silent = FakeDevice(
        **dict.fromkeys(("ecc", "rows", "clocks", "temperature", "pcie", "used"), NOT_SUPPORTED),
        processes=NOT_SUPPORTED,
        links=[],
    )
    (read,) = Accelerators(FakeNvml(silent), {}).read()
    assert read == DeviceReading("GPU-1")
    assert read.ecc_uncorrected is None and read.nvlink_errors is None
    node = Node(device := FakeDevice(ecc=NOT_SUPPORTED))
    assert node.look() == ()
    device.ecc = 7  # not known to have grown
    assert one(node.look()).level is Level.NOTE


def test_a_device_that_is_gone_is_lost() -> None:
    node = Node(device := FakeDevice(), FakeDevice("GPU-2"))
    node.look()
    device.gone = True
    found = one(node.look())
    assert (found.kind, found.level, found.lost, found.where) == (
        "lost",
        Level.UNFIT,
        True,
        "GPU-1",
    )


def test_a_library_that_fails_or_is_not_there_is_said_to_be_missing() -> None:
    for failure in (
        pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED),
        pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND),
        OSError("no such library"),
    ):
        with pytest.raises(NoLibrary):
            Accelerators(FakeNvml(fails=failure), {})


def test_a_driver_that_tells_of_no_events_is_still_read() -> None:
    nvml = FakeNvml(FakeDevice(ecc=2))
    nvml.hears = False
    there = Accelerators(nvml, {})
    assert there.xids(0.0) == ()
    assert there.read()[0].ecc_uncorrected == 2
    there.close()
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
def test_only_the_jobs_own_devices_are_looked_at(visible: str | None, seen: list[str]) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    there = Accelerators(FakeNvml(FakeDevice(), FakeDevice("GPU-2")), environment)
    assert [one.device for one in there.read()] == seen


def test_a_single_question_that_fails_costs_its_own_value() -> None:
    device = FakeDevice(rows=LOST, ecc=1)
    (read,) = Accelerators(FakeNvml(device), {}).read()
    assert read == replace(read, remap_pending=None, ecc_uncorrected=1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_device_is_read_and_found_healthy() -> None:
    there = Accelerators.of_this_node()
    readings = there.read()
    assert readings and all(one.device.startswith("GPU-") for one in readings)
    assert all(one.memory_total for one in readings)
    assert there.xids(0.0) == ()
    there.close()


def test_an_injected_xid_is_found_on_a_node_without_devices_too() -> None:
    watch = HealthWatch(lambda: Probes((), "", None), 5.0, lambda: 0, lambda _found: None, LIMITS)
    watch.pretend_xid(79)
    watch.look(Probes((), "", None), time.monotonic())
    (found,) = (one for one in watch.findings if one.kind == "xid")
    assert (found.code, found.lost, found.where) == (79, True, "injected")
