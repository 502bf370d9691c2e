# ruff: noqa: N802  (the functions of NVML have their own names)
"""A fake of `pynvml` with settable values.

A value that is an exception is raised; NOT_SUPPORTED stands for a feature that the device lacks.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml

NOT_SUPPORTED = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
LOST = pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)


@dataclass
class FakeDevice:
    """The values of a healthy H100 with ECC and four NVLinks."""

    uuid: str = "GPU-1"
    ecc: Any = 0
    rows: Any = (0, 0, 0, 0)
    clocks: Any = 0
    temperature: Any = 41
    links: list[list[Any]] = field(default_factory=lambda: [[0, 0, 0, 0] for _ in range(4)])
    pcie: Any = 0
    used: Any = 600 << 20
    processes: Any = ()
    gone: bool = False


class FakeNvml:
    """The functions of NVML that Holdfast uses, over `FakeDevice`s."""

    NVMLError = pynvml.NVMLError
    NVMLError_GpuIsLost = pynvml.NVMLError_GpuIsLost
    NVMLError_ResetRequired = pynvml.NVMLError_ResetRequired

    def __init__(self, *devices: FakeDevice, fails: Exception | None = None) -> None:
        self.devices = list(devices)
        self.fails = fails
        self.events: deque[Any] = deque()
        self.open = 0
        self.supports_events = True

    def xid(self, number: int, device: int = 0) -> None:
        """Queue an XID event of the driver."""
        kind = pynvml.nvmlEventTypeXidCriticalError
        event = SimpleNamespace(device=self.devices[device], eventType=kind, eventData=number)
        self.events.append(event)

    def nvmlInit(self) -> None:
        if self.fails is not None:
            raise self.fails
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeDevice:
        return self.devices[index]

    def nvmlDeviceGetUUID(self, device: FakeDevice) -> str:
        return str(_answer(device, device.uuid))

    def nvmlDeviceGetTotalEccErrors(self, device: FakeDevice, kind: int, counter: int) -> int:
        assert kind == pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        assert counter == pynvml.NVML_VOLATILE_ECC
        return int(_answer(device, device.ecc))

    def nvmlDeviceGetRemappedRows(self, device: FakeDevice) -> tuple[int, int, int, int]:
        rows: tuple[int, int, int, int] = _answer(device, device.rows)
        return rows

    def nvmlDeviceGetCurrentClocksEventReasons(self, device: FakeDevice) -> int:
        return int(_answer(device, device.clocks))

    def nvmlDeviceGetTemperature(self, device: FakeDevice, sensor: int) -> int:
        assert sensor == pynvml.NVML_TEMPERATURE_GPU
        return int(_answer(device, device.temperature))

    def nvmlDeviceGetNvLinkErrorCounter(self, device: FakeDevice, link: int, kind: int) -> int:
        if link >= len(device.links):
            raise NOT_SUPPORTED
        return int(_answer(device, device.links[link][kind]))

    def nvmlDeviceGetPcieReplayCounter(self, device: FakeDevice) -> int:
        return int(_answer(device, device.pcie))

    def nvmlDeviceGetMemoryInfo(self, device: FakeDevice) -> Any:
        return SimpleNamespace(used=_answer(device, device.used), total=80 << 30)

    def nvmlDeviceGetComputeRunningProcesses(self, device: FakeDevice) -> list[Any]:
        return list(_answer(device, device.processes))

    def nvmlEventSetCreate(self) -> Any:
        return self.events

    def nvmlDeviceRegisterEvents(self, device: FakeDevice, kinds: int, events: Any) -> None:
        assert kinds == pynvml.nvmlEventTypeXidCriticalError and events is self.events
        if not self.supports_events:
            raise NOT_SUPPORTED

    def nvmlEventSetWait_v2(self, events: Any, timeout_ms: int) -> Any:
        assert timeout_ms == 0
        if not self.events:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
        return self.events.popleft()

    def nvmlEventSetFree(self, events: Any) -> None:
        self.events.clear()


def _answer(device: FakeDevice, value: Any) -> Any:
    if device.gone:
        raise LOST
    if isinstance(value, Exception):
        raise value
    return value
