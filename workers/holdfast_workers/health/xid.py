"""XID errors by class: whether the program or the device is at fault.

The numbers are those of NVIDIA's public catalogue (docs.nvidia.com/deploy/xid-errors). A number
that the catalogue attributes to neither a program nor a device stays a note: a node is given up
only for errors that are known to be its own fault.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from holdfast_workers.protocol.findings import Level


class XidClass(StrEnum):
    APPLICATION = "application"  # caused by the program: it would happen on another node too
    CONTAINED = "contained"  # the device failed, and only the program that used it was affected
    LINK = "link"  # an error of a link between devices
    HARDWARE = "hardware"  # the device, its memory or its firmware
    LOST = "lost"  # the device has disappeared
    UNKNOWN = "unknown"


LEVELS = {
    XidClass.APPLICATION: Level.NOTE,
    XidClass.CONTAINED: Level.SUSPECT,
    XidClass.LINK: Level.SUSPECT,
    XidClass.HARDWARE: Level.UNFIT,
    XidClass.LOST: Level.UNFIT,
    XidClass.UNKNOWN: Level.NOTE,
}


@dataclass(frozen=True)
class XidMeaning:
    kind: XidClass
    description: str


_APPLICATION = {
    13: "graphics engine exception",
    31: "memory page fault",
    43: "the device stopped processing a faulty program",
    45: "preemptive clean-up after a program's end",
    68: "video processor exception",
    69: "graphics engine class error",
}
_CONTAINED = {
    63: "a memory row or page is to be replaced",
    92: "high rate of corrected memory errors",
    94: "contained uncorrectable memory error",
}
_LINK = {
    74: "NVLink error",
    145: "NVLink RLW error",
    147: "NVLink TREX error",
    149: "NVLink NETIR error",
}
_HARDWARE = {
    48: "double-bit memory error",
    61: "internal microcontroller breakpoint",
    62: "internal microcontroller halt",
    64: "a memory row or page could not be replaced",
    95: "uncontained memory error",
    119: "timeout of a call to the device's system processor",
    120: "error of the device's system processor",
    140: "unrecovered memory error",
    143: "the device could not be initialised",
}
_LOST = {79: "the device has fallen off the bus"}

XIDS: dict[int, XidMeaning] = {
    number: XidMeaning(kind, description)
    for kind, table in (
        (XidClass.APPLICATION, _APPLICATION),
        (XidClass.CONTAINED, _CONTAINED),
        (XidClass.LINK, _LINK),
        (XidClass.HARDWARE, _HARDWARE),
        (XidClass.LOST, _LOST),
    )
    for number, description in table.items()
}


def meaning(number: int) -> XidMeaning:
    return XIDS.get(number, XidMeaning(XidClass.UNKNOWN, "not classified"))
