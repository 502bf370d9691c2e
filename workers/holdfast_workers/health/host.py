"""Reads the machine's and its network's values from the kernel. Does not evaluate them.

`root` is the folder of /proc and /sys. A file that is missing or cannot be parsed gives no value.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

from holdfast_workers.health.findings import DiskReading, HostReading, NetworkReading

ROOT = Path("/")
BAD_PACKETS = ("rx_errors", "tx_errors", "rx_dropped", "tx_dropped")
PACKETS = ("rx_packets", "tx_packets")


def read_host(folders: Iterable[str], root: Path = ROOT) -> HostReading:
    """Read the machine's values. `folders`: folders whose disks need free space."""
    memory = _memory(root)
    disks = (_disk(folder) for folder in dict.fromkeys(folders))
    return HostReading(
        stalled_share=_stalled_share(root),
        memory_available=memory.get("MemAvailable"),
        memory_total=memory.get("MemTotal"),
        disks=tuple(disk for disk in disks if disk is not None),
        handles=_handles(root),
        clock_offset_s=time.time() - time.monotonic(),
        io_errors=_io_errors(root),
    )


def read_network(interface: str, root: Path = ROOT) -> NetworkReading:
    folder = root / "sys/class/net" / interface
    return NetworkReading(
        interface,
        up=_up(folder),
        errors=_sum(folder / "statistics" / name for name in BAD_PACKETS),
        packets=_sum(folder / "statistics" / name for name in PACKETS),
    )


def _stalled_share(root: Path) -> float | None:
    """`full avg60` of the kernel's pressure stall information."""
    for line in (_text(root / "proc/pressure/memory") or "").splitlines():
        kind, *values = line.split()
        found = dict(value.split("=", 1) for value in values if "=" in value)
        if kind == "full" and "avg60" in found:
            return _number(found["avg60"], 0.01)
    return None


def _memory(root: Path) -> dict[str, int]:
    """The fields of /proc/meminfo, in bytes."""
    found: dict[str, int] = {}
    for line in (_text(root / "proc/meminfo") or "").splitlines():
        name, _, value = line.partition(":")
        parts = value.split()
        if parts and parts[0].isdigit():
            found[name] = int(parts[0]) * (1024 if parts[-1] == "kB" else 1)
    return found


def _disk(folder: str) -> DiskReading | None:
    """The disk of a folder; if the folder does not exist yet, the disk on which it will be made."""
    path = Path(folder)
    try:
        existing = next((folder for folder in (path, *path.parents) if folder.exists()), path)
        found = os.statvfs(existing)
    except OSError:
        return None
    size = found.f_frsize
    return DiskReading(folder, found.f_bavail * size, found.f_blocks * size)


def _handles(root: Path) -> tuple[int, int] | None:
    parts = (_text(root / "proc/sys/fs/file-nr") or "").split()
    if len(parts) != 3 or not all(part.isdigit() for part in parts):
        return None
    return int(parts[0]), int(parts[2])


def _io_errors(root: Path) -> int | None:
    """The sum over all devices whose drivers count errors (in hexadecimal)."""
    found: list[int] = []
    for path in (root / "sys/block").glob("*/device/ioerr_cnt"):
        try:
            found.append(int((_text(path) or "").strip(), 16))
        except ValueError:
            continue
    return sum(found) if found else None


def _up(folder: Path) -> bool | None:
    """Whether the link is up. The kernel reports `unknown` for an interface without a link
    (loopback), which counts as up."""
    state = (_text(folder / "operstate") or "").strip()
    if state in ("down", "lowerlayerdown", "notpresent"):
        return False
    return True if state in ("up", "unknown") else None


def _sum(paths: Iterable[Path]) -> int | None:
    """The sum of the numbers in the files; None if any cannot be read: a partial sum would pass for
    the whole."""
    total = 0
    for path in paths:
        text = (_text(path) or "").strip()
        if not text.isdigit():
            return None
        total += int(text)
    return total


def _number(text: str, scale: float) -> float | None:
    try:
        return float(text) * scale
    except ValueError:
        return None


def _text(path: Path) -> str | None:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return None
