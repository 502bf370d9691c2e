"""Readings of a node's health, as probes measured them. Findings are in `protocol/findings.py`.

A value that could not be measured is None: it never counts as zero, nor as healthy.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Xid:
    """An error of a device, as the driver reported it."""

    device: str
    number: int
    at: float


@dataclass(frozen=True)
class DeviceReading:
    """The values of an accelerator. Counters count from the driver's start."""

    device: str  # its UUID
    lost: bool = False  # the driver reports it as gone, or as needing a reset
    ecc_uncorrected: int | None = None
    remap_pending: bool | None = None  # memory rows are to be replaced at the next reset
    remap_failed: bool | None = None  # no spare row was left
    throttle: frozenset[str] | None = None  # reasons for lower clocks at this moment
    temperature_c: int | None = None
    nvlink_errors: int | None = None  # replays, recoveries and CRC errors of all links
    pcie_replays: int | None = None
    memory_used: int | None = None
    memory_total: int | None = None
    processes: int | None = None  # number of processes that the driver sees on it


@dataclass(frozen=True)
class DiskReading:
    folder: str
    free: int
    total: int


@dataclass(frozen=True)
class HostReading:
    stalled_share: float | None = None  # of the last minute, in which every task waited for memory
    memory_available: int | None = None
    memory_total: int | None = None
    disks: tuple[DiskReading, ...] = ()
    handles: tuple[int, int] | None = None  # open files of the machine, and how many it allows
    clock_offset_s: float | None = None  # wall clock less monotonic clock
    io_errors: int | None = None  # of all block devices


@dataclass(frozen=True)
class NetworkReading:
    """The values of the network interface that training uses."""

    interface: str
    up: bool | None = None
    errors: int | None = None
    packets: int | None = None


@dataclass(frozen=True)
class HealthSnapshot:
    """All values that were read at time `at` (`time.monotonic()`)."""

    at: float
    devices: tuple[DeviceReading, ...] | None = None  # None: NVML is not available
    host: HostReading = field(default_factory=HostReading)
    network: NetworkReading | None = None
    workers: int = 0  # the agent's live workers
