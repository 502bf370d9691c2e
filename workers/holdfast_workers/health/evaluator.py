"""Evaluates health readings into findings. Pure: the same readings give the same findings.

A value that was not measured gives no finding, neither good nor bad. A counter matters only by its
growth between two readings. A fault of the device makes a node unfit; a fault of a program does
not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from holdfast_workers.byte_sizes import size_of
from holdfast_workers.health.findings import (
    DeviceReading,
    HealthSnapshot,
    HostReading,
    NetworkReading,
    Xid,
)
from holdfast_workers.health.xid import LEVELS, XidClass, meaning
from holdfast_workers.protocol.findings import HealthFinding, Level

MIB = 1 << 20


@dataclass(frozen=True)
class HealthLimits:
    """The thresholds of findings. Shares from 0 to 1, times in seconds."""

    window_s: float = 600.0
    """The window for the growth of counters, and for which the XIDs of programs are remembered."""
    nvlink_errors: int = 100
    pcie_replays: int = 1000
    leaked_bytes: int = 1024 * MIB
    """Device memory that is in use although no process uses the device."""
    stalled_share: float = 0.10
    """The share of the last minute in which every task of the machine waited for memory."""
    memory_available_share: float = 0.02
    disk_free_share: float = 0.02
    disk_free_bytes: int = 1024 * MIB
    """A disk counts as full only below both of its limits."""
    handles_share: float = 0.90
    clock_jump_s: float = 1.0
    io_errors: int = 1
    packet_error_share: float = 0.001
    packet_errors: int = 100
    """Fewer packet errors give no finding, whatever their share."""


def evaluate(
    earlier: HealthSnapshot, now: HealthSnapshot, xids: Iterable[Xid], limits: HealthLimits
) -> tuple[HealthFinding, ...]:
    """Findings of `now`, and of the changes since `earlier` (at most a window before; may be the
    same). `xids`: all XIDs received by this process, with `at` in the same clock."""
    found = list(_of_xids(xids, now.at, limits))
    before = {device.device: device for device in earlier.devices or ()}
    for device in now.devices or ():
        found += _of_device(before.get(device.device, device), device, now.workers, limits)
    found += _of_host(earlier.host, now.host, limits)
    if now.network is not None:
        found += _of_network(earlier.network or now.network, now.network, limits)
    return tuple(found)


def _of_xids(xids: Iterable[Xid], now: float, limits: HealthLimits) -> Iterator[HealthFinding]:
    """One finding for each device and number. A fault of the device itself never expires."""
    seen: dict[tuple[str, int], int] = {}
    for xid in xids:
        kind = meaning(xid.number).kind
        lasting = kind in (XidClass.HARDWARE, XidClass.LOST)
        if lasting or xid.at > now - limits.window_s:
            seen[xid.device, xid.number] = seen.get((xid.device, xid.number), 0) + 1
    for (device, number), times in seen.items():
        means = meaning(number)
        again = f", {times} times" if times > 1 else ""
        yield HealthFinding(
            "accelerator",
            "xid",
            LEVELS[means.kind],
            f"XID {number} ({means.kind}: {means.description}) of {device}{again}",
            where=device,
            code=number,
            lost=means.kind is XidClass.LOST,
        )


def _of_device(
    before: DeviceReading, now: DeviceReading, workers: int, limits: HealthLimits
) -> Iterator[HealthFinding]:
    def found(kind: str, level: Level, what: str, *, lost: bool = False) -> HealthFinding:
        message = f"{what} on {now.device}"
        return HealthFinding("accelerator", kind, level, message, where=now.device, lost=lost)

    if now.lost:
        yield found("lost", Level.UNFIT, "the driver cannot reach the device any more", lost=True)
        return
    if errors := _growth(before.ecc_uncorrected, now.ecc_uncorrected):
        yield found("ecc", Level.UNFIT, f"{errors} uncorrectable memory errors")
    elif now.ecc_uncorrected:
        count = now.ecc_uncorrected
        yield found("ecc", Level.NOTE, f"{count} uncorrectable memory errors before this job")
    if now.remap_failed:
        yield found("row_remap", Level.UNFIT, "a bad memory row could not be replaced")
    elif now.remap_pending:
        yield found("row_remap", Level.SUSPECT, "memory rows wait for a reset to be replaced")
    yield from _of_clocks(now)
    if (errors := _growth(before.nvlink_errors, now.nvlink_errors) or 0) >= limits.nvlink_errors:
        yield found("nvlink", Level.SUSPECT, f"{errors} NVLink errors in {limits.window_s:g} s")
    if (replays := _growth(before.pcie_replays, now.pcie_replays) or 0) >= limits.pcie_replays:
        yield found("pcie", Level.SUSPECT, f"{replays} PCIe replays in {limits.window_s:g} s")
    # A container may hide processes: while workers live, an empty list proves nothing.
    alone = now.processes == 0 and before.processes == 0 and workers == 0
    if alone and min(before.memory_used or 0, now.memory_used or 0) >= limits.leaked_bytes:
        used = size_of(now.memory_used or 0)
        yield found("leak", Level.SUSPECT, f"{used} in use, and no process uses it")


def _of_clocks(now: DeviceReading) -> Iterator[HealthFinding]:
    """Heat and lack of power are faults of the machine; a power cap is a setting."""
    reasons = now.throttle or frozenset()
    heat = f" at {now.temperature_c} °C" if now.temperature_c is not None else ""
    for kind, level, text in (
        ("hw_thermal", Level.SUSPECT, f"clocks halved because of heat{heat}"),
        ("power_brake", Level.SUSPECT, "clocks halved by the power supply's brake"),
        ("hw_slowdown", Level.SUSPECT, "clocks lowered by the hardware"),
        ("sw_thermal", Level.NOTE, f"clocks lowered because of heat{heat}"),
        ("power_cap", Level.NOTE, "clocks lowered by the power limit"),
    ):
        if kind in reasons:
            what = f"{text} on {now.device}"
            yield HealthFinding("accelerator", kind, level, what, where=now.device)


def _of_host(
    before: HostReading, now: HostReading, limits: HealthLimits
) -> Iterator[HealthFinding]:
    def found(kind: str, level: Level, what: str, where: str = "") -> HealthFinding:
        return HealthFinding("host", kind, level, what, where=where)

    if now.stalled_share is not None and now.stalled_share >= limits.stalled_share:
        share = f"{now.stalled_share:.0%} of the last minute all tasks waited for memory"
        yield found("memory_pressure", Level.SUSPECT, share)
    if now.memory_available is not None and now.memory_total:
        share_left = now.memory_available / now.memory_total
        if share_left < limits.memory_available_share:
            left = f"{size_of(now.memory_available)} of memory are left ({share_left:.1%})"
            yield found("memory", Level.SUSPECT, left)
    for disk in now.disks:
        if disk.free < min(limits.disk_free_share * disk.total, limits.disk_free_bytes):
            left = f"{size_of(disk.free)} are left in {disk.folder}"
            yield found("disk", Level.SUSPECT, left, disk.folder)
    if now.handles is not None and now.handles[0] >= limits.handles_share * now.handles[1]:
        yield found("handles", Level.SUSPECT, f"{now.handles[0]} of {now.handles[1]} open files")
    if before.clock_offset_s is not None and now.clock_offset_s is not None:
        jump = now.clock_offset_s - before.clock_offset_s
        if abs(jump) >= limits.clock_jump_s:
            yield found("clock", Level.NOTE, f"the clock was set by {jump:+.1f} s")
    errors = _growth(before.io_errors, now.io_errors) or 0
    if errors >= limits.io_errors:
        yield found("io", Level.SUSPECT, f"{errors} I/O errors of disks in {limits.window_s:g} s")


def _of_network(
    before: NetworkReading, now: NetworkReading, limits: HealthLimits
) -> Iterator[HealthFinding]:
    def found(kind: str, what: str) -> HealthFinding:
        return HealthFinding("network", kind, Level.SUSPECT, what, where=now.interface)

    if now.up is False:
        yield found("link", f"{now.interface} is down")
    errors, packets = _growth(before.errors, now.errors), _growth(before.packets, now.packets)
    if errors is None or packets is None or errors < limits.packet_errors:
        return
    if errors >= limits.packet_error_share * max(packets, 1):
        yield found("errors", f"{errors} of {packets} packets of {now.interface} were bad or lost")


def _growth(before: int | None, now: int | None) -> int | None:
    """The growth of a counter; None if it was not measured. A counter that went back was reset, and
    counts from zero."""
    if before is None or now is None:
        return None
    return now - before if now >= before else now


def changed(before: Sequence[HealthFinding], now: Sequence[HealthFinding]) -> bool:
    """Whether findings came or went. Findings that differ only in their numbers are the same."""
    return {finding.key for finding in before} != {finding.key for finding in now}
