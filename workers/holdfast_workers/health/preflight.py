"""The check of a node before first use: arithmetic with a known result, and the speed of memory.

Runs in a process of its own, forked by the zygote: a device that hangs or a processor that faults
affects that process, not the agent. The matrix products are of small whole numbers, so they are
exact in every format and in every order of summation. The expected product is computed here in
whole numbers, and checked by its digest.
"""

from __future__ import annotations

import contextlib
import socket
import time
from typing import TYPE_CHECKING

from holdfast_workers.ipc import control_channel
from holdfast_workers.protocol.findings import HealthFinding, Level
from holdfast_workers.protocol.processes import PreflightJob, PreflightResult
from holdfast_workers.state.digest import payload_digest

if TYPE_CHECKING:
    import torch

ROWS, COLUMNS = 31, 29
"""Periods of the factors: the product repeats after so many rows and columns."""
INNER = 1024
"""The inner size of the products: not a multiple of both periods, over which all products would be
equal."""
KNOWN_DIGEST = "b6ae9cc4f317d2817b08d3c58fb46ba2"
ROUNDS = 3
HOST_REPEATS, DEVICE_REPEATS = 5, 150
HOST_COPY_BYTES, DEVICE_COPY_BYTES = 32 << 20, 512 << 20


def run(end: socket.socket, job: PreflightJob) -> int:
    """Check processor and devices, and send the result to the agent."""
    found: list[HealthFinding] = []
    measured = {}
    for device in devices(job.devices):
        findings, copied = check(device, job.memory_floor_gb_per_s)
        found += findings
        measured[device] = copied
    with contextlib.suppress(control_channel.ControlClosed):  # the agent has given up waiting
        control_channel.send(end, PreflightResult(tuple(found), measured))
    return 0


def devices(with_accelerators: bool) -> list[str]:
    import torch

    count = torch.cuda.device_count() if with_accelerators else 0
    return ["cpu", *(f"cuda:{index}" for index in range(count))]


def check(device: str, floor_gb_per_s: float) -> tuple[list[HealthFinding], float]:
    """Findings about a device, and the speed of its memory in GB/s. `floor_gb_per_s` 0: no
    minimum."""
    found: list[HealthFinding] = []
    for name, wrong in _wrong_products(device).items():
        what = f"{wrong} numbers of a product ({name}) on {device} are wrong"
        found.append(HealthFinding("preflight", "arithmetic", Level.UNFIT, what, device))
    copied = _copies_per_second(device) / 1e9
    rounded = round(copied, 2)
    if floor_gb_per_s and copied < floor_gb_per_s:
        slow = (
            f"memory of {device} is copied at {rounded:.1f} GB/s, {floor_gb_per_s:g} are required"
        )
        found.append(HealthFinding("preflight", "memory_speed", Level.UNFIT, slow, device))
    return found, rounded


def expected() -> torch.Tensor:
    """One period of the expected product, in whole numbers."""
    left, right = _factors(1)
    return left @ right


def digest_of(product: torch.Tensor) -> str:
    return payload_digest(product.contiguous().numpy().tobytes())


def _wrong_products(device: str) -> dict[str, int]:
    """Format → the number of wrong elements, in the worst of a few rounds."""
    import torch

    period, wrong = expected(), {}
    if digest_of(period) != KNOWN_DIGEST:
        wrong["whole numbers"] = period.numel()
    repeats = HOST_REPEATS if device == "cpu" else DEVICE_REPEATS
    for name, kind, tensor_cores in (
        ("float64", torch.float64, False),
        ("float32", torch.float32, False),
        ("tf32", torch.float32, True),
    ):
        if tensor_cores and device == "cpu":
            continue
        torch.backends.cuda.matmul.allow_tf32 = tensor_cores
        left, right = (factor.to(device, kind) for factor in _factors(repeats))
        target = period.to(device, kind).repeat(repeats, repeats)
        counts = [int((left @ right != target).sum()) for _ in range(ROUNDS)]
        if max(counts):
            wrong[name] = max(counts)
    return wrong


def _factors(repeats: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors of small whole numbers whose product has `repeats` periods in each direction."""
    import torch

    rows, columns = torch.arange(ROWS * repeats), torch.arange(COLUMNS * repeats)
    inner = torch.arange(INNER)
    left = (rows[:, None] * 7 + inner[None, :] * 13) % ROWS - ROWS // 2
    right = (inner[:, None] * 11 + columns[None, :] * 5) % COLUMNS - COLUMNS // 2
    return left, right


def _copies_per_second(device: str) -> float:
    """Bytes read and written per second by a copy; the best of a few rounds."""
    import torch

    nbytes = HOST_COPY_BYTES if device == "cpu" else DEVICE_COPY_BYTES
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(ROUNDS):
        began = time.perf_counter()
        target.copy_(source)
        if device != "cpu":
            torch.cuda.synchronize(device)
        best = max(best, 2 * nbytes / (time.perf_counter() - began))
    return best
