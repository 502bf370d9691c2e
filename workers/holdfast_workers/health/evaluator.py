"""From readings to findings. Pure: the same readings give the same findings.

Promises: what was not measured gives no finding, neither good nor bad; counters count only for
what they grew by while somebody looked; a device's own fault makes a node unfit, a program's not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from holdfast_workers.health.findings import (
    DeviceReading,
    Finding,
    HostReading,
    Level,
    NetworkReading,
    Observed,
    Xid,
)
from holdfast_workers.health.xid import LEVELS, XidClass, meaning

MIB = 1 << 20


@dataclass(frozen=True)
class HealthLimits:
    """From where on something is worth a finding. Shares from 0 to 1, times in seconds."""

    window_s: float = 600.0
    """Over which the growth of counters is looked at, and programs' XIDs are remembered."""
    nvlink_errors: int = 100
    pcie_replays: int = 1000
    leaked_bytes: int = 1024 * MIB
    """Memory of a device that is in use though no process uses it."""
    stalled_share: float = 0.10
    """Of the last minute, in which every task of the machine waited for memory."""
    memory_available_share: float = 0.02
    disk_free_share: float = 0.02
    disk_free_bytes: int = 1024 * MIB
    """A disk is full only if it has less than both."""
    handles_share: float = 0.90
    clock_jump_s: float = 1.0
    io_errors: int = 1
    packet_error_share: float = 0.001
    packet_errors: int = 100
    """Fewer are no finding, whatever their share."""


def evaluate(
    earlier: Observed, now: Observed, xids: Iterable[Xid], limits: HealthLimits
) -> tuple[Finding, ...]:
    """Findings of `now`, and of what changed since `earlier` (at most a window before, perhaps the
    same). `xids`, with `at` in the same clock: all that were heard in this life."""
    found = list(_of_xids(xids, now.at, limits))
    before = {one.device: one for one in earlier.devices or ()}
    for device in now.devices or ():
        found += _of_device(before.get(device.device, device), device, now.workers, limits)
    found += _of_host(earlier.host, now.host, limits)
    if now.network is not None:
        found += _of_network(earlier.network or now.network, now.network, limits)
    return tuple(found)


def _of_xids(xids: Iterable[Xid], now: float, limits: HealthLimits) -> Iterator[Finding]:
    """One finding per device and number. A device's own fault counts until it is looked after."""
    seen: dict[tuple[str, int], int] = {}
    for one in xids:
        kind = meaning(one.number).kind
        lasting = kind in (XidClass.HARDWARE, XidClass.LOST)
        if lasting or one.at > now - limits.window_s:
            seen[one.device, one.number] = seen.get((one.device, one.number), 0) + 1
    for (device, number), times in seen.items():
        means = meaning(number)
        again = f", {times} times" if times > 1 else ""
        yield Finding(
            "accelerator",
            "xid",
            LEVELS[means.kind],
            f"XID {number} ({means.kind}: {means.words}) of {device}{again}",
            where=device,
            code=number,
            lost=means.kind is XidClass.LOST,
        )


def _of_device(
    before: DeviceReading, now: DeviceReading, workers: int, limits: HealthLimits
) -> Iterator[Finding]:
    def found(kind: str, level: Level, what: str, *, lost: bool = False) -> Finding:
        said = f"{what} on {now.device}"
        return Finding("accelerator", kind, level, said, where=now.device, lost=lost)

    if now.lost:
        yield found("lost", Level.UNFIT, "the driver reaches no device any more", lost=True)
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
    # A container may hide processes: beside living workers an empty list tells nothing.
    alone = now.processes == 0 and before.processes == 0 and workers == 0
    if alone and min(before.memory_used or 0, now.memory_used or 0) >= limits.leaked_bytes:
        used = (now.memory_used or 0) // MIB
        yield found("leak", Level.SUSPECT, f"{used} MiB in use, and no process uses it")


def _of_clocks(now: DeviceReading) -> Iterator[Finding]:
    """Heat and lack of power are the machine's fault; a power cap is somebody's setting."""
    reasons = now.throttle or frozenset()
    heat = f" at {now.temperature_c} °C" if now.temperature_c is not None else ""
    for kind, level, words in (
        ("hw_thermal", Level.SUSPECT, f"clocks halved for heat{heat}"),
        ("power_brake", Level.SUSPECT, "clocks halved by the power supply's brake"),
        ("hw_slowdown", Level.SUSPECT, "clocks lowered by the hardware"),
        ("sw_thermal", Level.NOTE, f"clocks lowered for heat{heat}"),
        ("power_cap", Level.NOTE, "clocks lowered by the power limit"),
    ):
        if kind in reasons:
            what = f"{words} on {now.device}"
            yield Finding("accelerator", kind, level, what, where=now.device)


def _of_host(before: HostReading, now: HostReading, limits: HealthLimits) -> Iterator[Finding]:
    def found(kind: str, level: Level, what: str, where: str = "") -> Finding:
        return Finding("host", kind, level, what, where=where)

    if now.stalled_share is not None and now.stalled_share >= limits.stalled_share:
        share = f"{now.stalled_share:.0%} of the last minute all tasks waited for memory"
        yield found("memory_pressure", Level.SUSPECT, share)
    if now.memory_available is not None and now.memory_total:
        share_left = now.memory_available / now.memory_total
        if share_left < limits.memory_available_share:
            left = f"{now.memory_available // MIB} MiB of memory are left ({share_left:.1%})"
            yield found("memory", Level.SUSPECT, left)
    for disk in now.disks:
        if disk.free < min(limits.disk_free_share * disk.total, limits.disk_free_bytes):
            left = f"{disk.free // MIB} MiB are left in {disk.folder}"
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
) -> Iterator[Finding]:
    def found(kind: str, what: str) -> Finding:
        return Finding("network", kind, Level.SUSPECT, what, where=now.interface)

    if now.up is False:
        yield found("link", f"{now.interface} is down")
    errors, packets = _growth(before.errors, now.errors), _growth(before.packets, now.packets)
    if errors is None or packets is None or errors < limits.packet_errors:
        return
    if errors >= limits.packet_error_share * max(packets, 1):
        yield found("errors", f"{errors} of {packets} packets of {now.interface} were bad or lost")


def _growth(before: int | None, now: int | None) -> int | None:
    """By how much a counter grew; None if it was not measured. One that went back was reset, and
    counts from zero."""
    if before is None or now is None:
        return None
    return now - before if now >= before else now


def changed(before: Sequence[Finding], now: Sequence[Finding]) -> bool:
    """Whether there is something new to tell: numbers alone are not."""
    return {one.key for one in before} != {one.key for one in now}
