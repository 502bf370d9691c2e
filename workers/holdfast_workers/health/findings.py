"""What is known of a node's health: readings as probes took them, findings as they were judged.

A value that could not be measured is None: it is never read as zero, nor as healthy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class Level(StrEnum):
    """How bad a finding is, mildest first."""

    NOTE = "note"  # worth knowing; no reason to do anything
    SUSPECT = "suspect"  # may become worse, or explain a fault; the node stays in use
    UNFIT = "unfit"  # nothing should be trained here as long as there is another node


@dataclass(frozen=True)
class Finding:
    probe: str  # "accelerator", "host", "network", "preflight", "exchange"
    kind: str  # of the finding, one of the probe's closed set
    level: Level
    what: str  # in words, with the numbers
    where: str = ""  # device, folder or interface
    code: int | None = None  # XID number
    lost: bool = False  # what ranks need is gone: none can go on here

    @property
    def key(self) -> tuple[str, str, str, str, int | None]:
        """What makes two findings the same one, whatever their numbers have become."""
        return (self.probe, self.kind, self.level, self.where, self.code)

    def data(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Finding:
        return cls(**{**data, "level": Level(data["level"])})


def is_unfit(findings: Iterable[Finding]) -> bool:
    return any(one.level is Level.UNFIT for one in findings)


def in_words(findings: Iterable[Finding], level: Level = Level.UNFIT) -> str:
    """What the findings of a level say, as one line."""
    return "; ".join(one.what for one in findings if one.level is level)


@dataclass(frozen=True)
class Xid:
    """An error that the driver reported of a device."""

    device: str
    number: int
    at: float


@dataclass(frozen=True)
class DeviceReading:
    """One accelerator. Counters count from the driver's start."""

    device: str  # its UUID
    lost: bool = False  # the driver says that it is gone, or needs a reset
    ecc_uncorrected: int | None = None
    remap_pending: bool | None = None  # memory rows are to be replaced at the next reset
    remap_failed: bool | None = None  # there was no spare row left
    throttle: frozenset[str] | None = None  # reasons for lower clocks at this moment
    temperature_c: int | None = None
    nvlink_errors: int | None = None  # replays, recoveries and CRC errors of all links
    pcie_replays: int | None = None
    memory_used: int | None = None
    memory_total: int | None = None
    processes: int | None = None  # that the driver sees on it


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
    """The interface that training goes over."""

    interface: str
    up: bool | None = None
    errors: int | None = None
    packets: int | None = None


@dataclass(frozen=True)
class Observed:
    """All that was read at one moment (`time.monotonic()`)."""

    at: float
    devices: tuple[DeviceReading, ...] | None = None  # None: there is no library to ask
    host: HostReading = field(default_factory=HostReading)
    network: NetworkReading | None = None
    workers: int = 0  # of this agent, alive
