# ruff: noqa: N802  (the functions of NVML have their own names)
"""Reads the state of accelerators through NVML. Does not evaluate it.

`Nvml` is the part of NVIDIA's library in use: the module `pynvml` provides it, and tests substitute
a fake. Each query may fail separately (not supported, no permission): then only its own value is
not measured.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from holdfast_workers.errors import WorkersError
from holdfast_workers.health.findings import DeviceReading, Xid

Value = TypeVar("Value")

THROTTLE_REASONS = {  # nvmlClocksEventReasons
    0x04: "power_cap",
    0x08: "hw_slowdown",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "power_brake",
}
NVLINK_ERROR_KINDS = 4  # replay, recovery, CRC of flits, CRC of data
MOST_LINKS = 18
EVENTS_AT_A_TIME = 64
XID_EVENT = 0x08  # nvmlEventTypeXidCriticalError
UNCORRECTED, SINCE_DRIVER_START = 1, 0  # nvmlMemoryErrorType, nvmlEccCounterType


class Nvml(Protocol):
    """The functions and error classes of NVML that are used, under their own names."""

    NVMLError: type[Exception]
    NVMLError_GpuIsLost: type[Exception]
    NVMLError_ResetRequired: type[Exception]

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...
    def nvmlDeviceGetCount(self) -> int: ...
    def nvmlDeviceGetHandleByIndex(self, index: int, /) -> Any: ...
    def nvmlDeviceGetUUID(self, device: Any, /) -> str: ...
    def nvmlDeviceGetTotalEccErrors(self, device: Any, kind: int, counter: int, /) -> int: ...
    def nvmlDeviceGetRemappedRows(self, device: Any, /) -> tuple[int, int, int, int]: ...
    def nvmlDeviceGetCurrentClocksEventReasons(self, device: Any, /) -> int: ...
    def nvmlDeviceGetTemperature(self, device: Any, sensor: int, /) -> int: ...
    def nvmlDeviceGetNvLinkErrorCounter(self, device: Any, link: int, kind: int, /) -> int: ...
    def nvmlDeviceGetPcieReplayCounter(self, device: Any, /) -> int: ...
    def nvmlDeviceGetMemoryInfo(self, device: Any, /) -> Any: ...
    def nvmlDeviceGetComputeRunningProcesses(self, device: Any, /) -> list[Any]: ...
    def nvmlEventSetCreate(self) -> Any: ...
    def nvmlDeviceRegisterEvents(self, device: Any, kinds: int, events: Any, /) -> None: ...
    def nvmlEventSetWait_v2(self, events: Any, timeout_ms: int, /) -> Any: ...
    def nvmlEventSetFree(self, events: Any, /) -> None: ...


class NvmlUnavailable(WorkersError):
    """NVML is not installed, or finds no driver: no device can be measured."""


class Accelerators:
    """The devices of this node that belong to the job. Not thread-safe."""

    def __init__(self, nvml: Nvml, environment: Mapping[str, str]) -> None:
        """Raises NvmlUnavailable. `environment` selects the devices by CUDA_VISIBLE_DEVICES."""
        self._nvml = nvml
        try:
            nvml.nvmlInit()
            self._devices = _visible(nvml, environment.get("CUDA_VISIBLE_DEVICES"))
        except (nvml.NVMLError, OSError) as error:
            raise NvmlUnavailable(f"NVML: {error}") from error
        self._events = self._listen()

    @classmethod
    def of_this_node(cls) -> Accelerators:
        """The devices according to the installed NVML. Raises NvmlUnavailable."""
        return cls(importlib.import_module("pynvml"), os.environ)

    def read(self) -> tuple[DeviceReading, ...]:
        return tuple(self._read(uuid, device) for uuid, device in self._devices.items())

    def xids(self, now: float) -> tuple[Xid, ...]:
        """Errors that arrived since the last call; empty where the driver does not report
        errors."""
        if self._events is None:
            return ()
        found: list[Xid] = []
        for _ in range(EVENTS_AT_A_TIME):
            try:
                event = self._nvml.nvmlEventSetWait_v2(self._events, 0)
            except (
                self._nvml.NVMLError
            ):  # usually no event is waiting; a lost device shows in `read`
                break
            if event.eventType & XID_EVENT:
                uuid = self._query(self._nvml.nvmlDeviceGetUUID, event.device)
                found.append(Xid(uuid or "a lost device", int(event.eventData), now))
        return tuple(found)

    def close(self) -> None:
        if self._events is not None:
            self._query(self._nvml.nvmlEventSetFree, self._events)
        self._query(self._nvml.nvmlShutdown)

    def _listen(self) -> Any | None:
        """An event set that receives XIDs; None if the driver does not support it."""
        events = self._query(self._nvml.nvmlEventSetCreate)
        if events is not None:
            for device in self._devices.values():
                self._query(self._nvml.nvmlDeviceRegisterEvents, device, XID_EVENT, events)
        return events

    def _read(self, uuid: str, device: Any) -> DeviceReading:
        nvml = self._nvml
        try:
            nvml.nvmlDeviceGetUUID(device)
        except (nvml.NVMLError_GpuIsLost, nvml.NVMLError_ResetRequired):
            return DeviceReading(uuid, lost=True)
        except nvml.NVMLError:
            return DeviceReading(uuid)
        rows = self._query(nvml.nvmlDeviceGetRemappedRows, device)
        reasons = self._query(nvml.nvmlDeviceGetCurrentClocksEventReasons, device)
        memory = self._query(nvml.nvmlDeviceGetMemoryInfo, device)
        processes = self._query(nvml.nvmlDeviceGetComputeRunningProcesses, device)
        return DeviceReading(
            uuid,
            ecc_uncorrected=self._query(
                nvml.nvmlDeviceGetTotalEccErrors, device, UNCORRECTED, SINCE_DRIVER_START
            ),
            remap_pending=None if rows is None else bool(rows[2]),
            remap_failed=None if rows is None else bool(rows[3]),
            throttle=None if reasons is None else _reasons(reasons),
            temperature_c=self._query(nvml.nvmlDeviceGetTemperature, device, 0),
            nvlink_errors=self._nvlink_errors(device),
            pcie_replays=self._query(nvml.nvmlDeviceGetPcieReplayCounter, device),
            memory_used=None if memory is None else int(memory.used),
            memory_total=None if memory is None else int(memory.total),
            processes=None if processes is None else len(processes),
        )

    def _nvlink_errors(self, device: Any) -> int | None:
        """The sum over all links; None if no counter could be read."""
        total: int | None = None
        for link in range(MOST_LINKS):
            counter = self._nvml.nvmlDeviceGetNvLinkErrorCounter
            counts = [
                self._query(counter, device, link, kind) for kind in range(NVLINK_ERROR_KINDS)
            ]
            known = [count for count in counts if count is not None]
            if not known:
                break  # no such link
            total = (total or 0) + sum(known)
        return total

    def _query(self, function: Callable[..., Value], *arguments: Any) -> Value | None:
        """Call an NVML function; None if it fails."""
        try:
            return function(*arguments)
        except self._nvml.NVMLError:
            return None


def _reasons(bits: int) -> frozenset[str]:
    return frozenset(name for bit, name in THROTTLE_REASONS.items() if bits & bit)


def _visible(nvml: Nvml, wanted: str | None) -> dict[str, Any]:
    """UUID → handle of the devices named by index or UUID; of all devices if `wanted` is None."""
    found: dict[str, Any] = {}
    names = None if wanted is None else {name.strip() for name in wanted.split(",")} - {""}
    for index in range(nvml.nvmlDeviceGetCount()):
        device = nvml.nvmlDeviceGetHandleByIndex(index)
        uuid = nvml.nvmlDeviceGetUUID(device)
        if names is None or str(index) in names or any(uuid.startswith(name) for name in names):
            found[uuid] = device
    return found
