"""Carries out the faults of a rank in its process: a signal, an ending, a hang.

`fault_injection/fault_points.py` decides when; `fault_injection/tensor_faults.py` has the faults in
live tensors.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import signal
import time

import structlog

from holdfast_workers.fault_injection.kinds import FaultKind, Injection
from holdfast_workers.ipc import readiness

OOM_CAP_BYTES = 256 * 1024 * 1024
"""How much memory a rank may take in an injected out-of-memory fault; the machine must survive."""

OOM_PIECE_BYTES = 16 * 1024 * 1024
FOREVER_S = 1e9

_log = structlog.get_logger()


class InjectedError(Exception):
    """Raised by an injected `raise`; the rest of Holdfast treats it as an error of the user's
    program."""


def carry_out(fault: Injection, point: str) -> None:
    """Execute the fault now, in this thread. Returns if the fault ends."""
    _log.warning(f"injected fault: {fault}", point=point)
    if (number := fault.kind.spec.signal) is not None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.kill(os.getpid(), number)
        return
    lasts_s = FOREVER_S if fault.duration_s is None else fault.duration_s
    match fault.kind:
        case FaultKind.EXIT:
            os._exit(fault.value("exit_code"))
        case FaultKind.RAISE:
            raise InjectedError(f"planned failure at {point}")
        case FaultKind.OOM:
            _run_out_of_memory(kill=fault.value("outcome") == "kill")
        case FaultKind.GIL:
            _hold_gil(lasts_s)
        case FaultKind.LOOP:
            until = time.monotonic() + lasts_s
            while time.monotonic() < until:
                pass
        case FaultKind.COLLECTIVE:
            time.sleep(lasts_s)
        case FaultKind.READ:
            _block_in_read(fault.duration_s)
        case _:
            raise ValueError(f"a process cannot execute {fault.kind} by itself")


def _hold_gil(lasts_s: float) -> None:
    """Sleep in a call that holds the GIL, which `PyDLL` does not release; if a signal interrupts
    the sleep, sleep again."""
    left_us = int(min(lasts_s, FOREVER_S / 2) * 1e6)
    libc = ctypes.PyDLL(None)
    while left_us > 0:
        piece_us = min(left_us, 2_000_000_000)
        if libc.usleep(piece_us) != 0:
            continue
        left_us -= piece_us


def _block_in_read(lasts_s: float | None) -> None:
    reader, writer = os.pipe()
    try:
        if lasts_s is None:
            os.read(reader, 1)
        else:
            readiness.is_readable(reader, lasts_s)
    finally:
        os.close(reader)
        os.close(writer)


def _run_out_of_memory(*, kill: bool) -> None:
    """Allocate memory under a limit of this process alone; the limit is reset if it survives."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit = _address_space_bytes() + OOM_CAP_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    taken: list[mmap.mmap] = []
    try:
        while True:
            try:
                taken.append(mmap.mmap(-1, OOM_PIECE_BYTES))
            except OSError as error:
                raise MemoryError(f"injected: no more memory ({error})") from error
            taken[-1].write(bytes(OOM_PIECE_BYTES))
    except MemoryError:
        if kill:
            os.kill(os.getpid(), signal.SIGKILL)
        raise
    finally:
        for piece in taken:
            piece.close()
        resource.setrlimit(resource.RLIMIT_AS, before)


def _address_space_bytes() -> int:
    with open("/proc/self/statm") as file:  # noqa: PTH123
        return int(file.read().split()[0]) * mmap.PAGESIZE
