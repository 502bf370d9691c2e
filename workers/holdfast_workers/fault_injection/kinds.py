"""The kinds of injected faults, the parameters of each, and their implementation in a process.

The vocabulary is pure and public: REST, command line, supervisor, agents and workers all use
`Injection`, and `injection_faults` lists every error in a request. `carry_out` executes a fault in
the calling thread; `fault_injection/tensor_faults.py` implements the faults in live tensors. No
fault runs without a request: `fault_injection/fault_points.py` decides when a fault is due.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import select
import signal
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any

from holdfast_workers.spec import SpecFault

OOM_CAP_BYTES = 256 * 1024 * 1024
"""How much memory a rank may take in an injected out-of-memory fault; the machine must survive."""

OOM_PIECE_BYTES = 16 * 1024 * 1024
FOREVER_S = 1e9


STORAGE_S = 10.0
"""How long the remote tier fails by default."""

PARTITION_S = 10.0
"""How long a link is down by default."""


class InjectedError(Exception):
    """Raised by an injected `raise`; the rest of Holdfast treats it as an error of the user's
    program."""


class FaultKind(StrEnum):
    KILL = "kill"
    SEGFAULT = "segfault"
    ABORT = "abort"
    EXIT = "exit"
    RAISE = "raise"
    OOM = "oom"
    STOP = "stop"
    GIL = "gil"
    LOOP = "loop"
    COLLECTIVE = "collective"
    READ = "read"
    SLOW = "slow"
    NAN = "nan"
    BIT_FLIP = "bit_flip"
    AGENT_DEATH = "agent_death"
    NODE_LOSS = "node_loss"
    PARTITION = "partition"
    RESET = "reset"
    XID = "xid"
    REMOTE_DOWN = "remote_down"
    DISK_FULL = "disk_full"
    SUPERVISOR_DEATH = "supervisor_death"


class Victim(StrEnum):
    """The process that executes a fault."""

    RANK = "rank"  # the process of the rank
    NODE = "node"  # the agent of the rank's node
    NODES = "nodes"  # every agent of the job
    SUPERVISOR = "supervisor"


@dataclass(frozen=True)
class FaultKindSpec:
    """A kind's description, its victim, and its parameters besides rank, step and phase."""

    description: str
    victim: Victim = Victim.RANK
    parameters: frozenset[str] = frozenset()


def _kind(description: str, *parameters: str, victim: Victim = Victim.RANK) -> FaultKindSpec:
    return FaultKindSpec(description, victim, frozenset(parameters))


KINDS: Mapping[FaultKind, FaultKindSpec] = {
    FaultKind.KILL: _kind("SIGKILL"),
    FaultKind.SEGFAULT: _kind("SIGSEGV, without a core file"),
    FaultKind.ABORT: _kind("SIGABRT, without a core file"),
    FaultKind.EXIT: _kind("the process ends by itself", "exit_code"),
    FaultKind.RAISE: _kind("an exception, as if the user's program had raised it"),
    FaultKind.OOM: _kind(
        "the rank allocates memory until none is left (capped), then raises `MemoryError` "
        "(`outcome: error`) or gets SIGKILL, like from the kernel (`outcome: kill`, the default)",
        "outcome",
    ),
    FaultKind.STOP: _kind("SIGSTOP: every thread stops"),
    FaultKind.GIL: _kind(
        "a C call that holds the GIL: no other thread of the rank runs", "duration_s"
    ),
    FaultKind.LOOP: _kind("the training thread runs in an endless loop", "duration_s"),
    FaultKind.COLLECTIVE: _kind(
        "the rank does not enter its next collective; with `duration_s` it enters late",
        "duration_s",
    ),
    FaultKind.READ: _kind(
        "the training thread reads from a pipe that never gets data", "duration_s"
    ),
    FaultKind.SLOW: _kind("the rank computes `factor` times as long", "factor", "steps"),
    FaultKind.NAN: _kind(
        "NaN in the output of the model, or of the module `target`, in one micro-batch; "
        "`where: gradient`: in the gradient of that output",
        "where",
        "target",
        "micro_batch",
    ),
    FaultKind.BIT_FLIP: _kind(
        "one flipped bit in a local tensor (`where`: gradient, parameter or moment; `target`: the "
        "parameter)",
        "where",
        "target",
        "bit",
    ),
    FaultKind.AGENT_DEATH: _kind(
        "SIGKILL of the node's agent, its ranks included", victim=Victim.NODE
    ),
    FaultKind.NODE_LOSS: _kind(
        "loss of the rank's node with all its memory (on the embedded cluster: its raylet)",
        victim=Victim.NODE,
    ),
    FaultKind.PARTITION: _kind(
        "the network links of the rank's node are down (those that its operator allows to be cut)",
        "duration_s",
        victim=Victim.NODE,
    ),
    FaultKind.RESET: _kind(
        "every connection to the data port of the rank's node is reset, as by a firewall",
        victim=Victim.NODE,
    ),
    FaultKind.XID: _kind(
        "the node's health probe sees an XID of its accelerator", "xid", victim=Victim.NODE
    ),
    FaultKind.REMOTE_DOWN: _kind(
        "the remote tier refuses every call of the job's nodes", "duration_s", victim=Victim.NODES
    ),
    FaultKind.DISK_FULL: _kind(
        "the remote tier has no space for writes of the job's nodes",
        "duration_s",
        victim=Victim.NODES,
    ),
    FaultKind.SUPERVISOR_DEATH: _kind("SIGKILL of the job's supervisor", victim=Victim.SUPERVISOR),
}

PHASES = (
    *("forming", "rendezvous", "restore"),
    *("load", "forward", "backward", "agree", "optimizer", "checkpoint"),
    *("memory", "committed", "save", "saved"),
)
"""Points of a rank at which a fault may be requested (`Fault points` in the architecture)."""

SIGNALS = {
    FaultKind.KILL: signal.SIGKILL,
    FaultKind.SEGFAULT: signal.SIGSEGV,
    FaultKind.ABORT: signal.SIGABRT,
    FaultKind.STOP: signal.SIGSTOP,
}
"""Faults that are a signal. At once, the agent sends it to the rank; at a step or phase, the
process sends it to itself."""

ANY_THREAD_KINDS = frozenset({*SIGNALS, FaultKind.EXIT, FaultKind.GIL})
"""Faults of a whole process, which its control thread may execute at any time."""

TAMPERING = frozenset({FaultKind.NAN, FaultKind.BIT_FLIP})

_WHOLE_NUMBERS = {
    "at_step": (1, 2**53),
    "micro_batch": (0, 2**31),
    "steps": (1, 2**31),
    "bit": (0, 31),
    "exit_code": (0, 255),
    "xid": (1, 1023),
}
_NUMBERS = {"factor": (1.0, 1000.0), "duration_s": (0.001, 86400.0)}
_WHERE = {
    FaultKind.NAN: ("output", "gradient"),
    FaultKind.BIT_FLIP: ("gradient", "parameter", "moment"),
}


@dataclass(frozen=True)
class Injection:
    """One requested fault. None means no restriction, or the default of the kind."""

    kind: FaultKind
    rank: int | None = None
    at_step: int | None = None
    phase: str | None = None
    duration_s: float | None = None
    """How long it lasts; None: forever (`STORAGE_S` for the remote tier, `PARTITION_S` for
    links)."""
    factor: float | None = None
    steps: int | None = None
    where: str | None = None
    target: str | None = None
    micro_batch: int | None = None
    bit: int | None = None
    exit_code: int | None = None
    outcome: str | None = None
    xid: int | None = None

    @property
    def victim(self) -> Victim:
        return KINDS[self.kind].victim

    @property
    def at_once(self) -> bool:
        """Whether it fires as soon as its victim receives it, at any point."""
        return self.at_step is None and self.phase is None and self.micro_batch is None

    def document(self) -> dict[str, Any]:
        """The fault as JSON, without fields that are None."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Injection:
        """The fault of a document in which `injection_faults` finds no error."""
        return cls(**{**document, "kind": FaultKind(document["kind"])})

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.document().items())


def injection_faults(document: Mapping[str, Any], world_size: int) -> list[SpecFault]:
    """Every error in the document of a requested fault, with its path."""
    names = {field.name for field in fields(Injection)}
    faults = [
        SpecFault(path=str(name), message="there is no such field")
        for name in document
        if name not in names
    ]
    given = {name: value for name, value in document.items() if value is not None}
    try:
        kind = FaultKind(given.get("kind", ""))
    except ValueError:
        known = ", ".join(FaultKind)
        return [*faults, SpecFault(path="kind", message=f"must be one of {known}")]
    for name, value in given.items():
        if name in names and name != "kind":
            problem = _field_problem(kind, name, value, world_size)
            faults += [SpecFault(path=name, message=problem)] if problem else []
    return faults


def program_faults(fault: Injection) -> list[SpecFault]:
    """Why the fault cannot be injected into a user's program, which has none of Holdfast's code:
    a signal can be sent to it at once."""
    if fault.victim is not Victim.RANK:
        return []
    if fault.kind not in SIGNALS:
        known = ", ".join(SIGNALS)
        message = f"{fault.kind} cannot be injected into a program of the user: use one of {known}"
        return [SpecFault(path="kind", message=message)]
    given = {"at_step": fault.at_step, "phase": fault.phase, "micro_batch": fault.micro_batch}
    return [
        SpecFault(path=name, message=f"a fault of a program has no {name}: leave it out")
        for name, value in given.items()
        if value is not None
    ]


def carry_out(fault: Injection, point: str) -> None:
    """Execute the fault now, in this thread. Returns if the fault ends."""
    import structlog  # late: the command line imports this module and must start fast

    structlog.get_logger().warning(f"injected fault: {fault}", point=point)
    lasts_s = FOREVER_S if fault.duration_s is None else fault.duration_s
    match fault.kind:
        case kind if kind in SIGNALS:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.kill(os.getpid(), SIGNALS[kind])
        case FaultKind.EXIT:
            os._exit(1 if fault.exit_code is None else fault.exit_code)
        case FaultKind.RAISE:
            raise InjectedError(f"planned failure at {point}")
        case FaultKind.OOM:
            _run_out_of_memory(kill=fault.outcome != "error")
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


def _field_problem(kind: FaultKind, name: str, value: Any, world_size: int) -> str | None:
    victim = KINDS[kind].victim
    parameters = set(KINDS[kind].parameters)
    parameters |= {"rank"} if victim in (Victim.RANK, Victim.NODE) else set()
    parameters |= {"at_step", "phase"} if victim is Victim.RANK else set()
    if name not in parameters:
        return f"{kind} does not have this parameter"
    if name == "target":
        return None if isinstance(value, str) and 0 < len(value) <= 200 else "must be a name"
    if name in _NUMBERS:
        return _number_problem(value, *_NUMBERS[name])
    whole = {**_WHOLE_NUMBERS, "rank": (0, world_size - 1)}
    if name in whole:
        return _whole_number_problem(value, *whole[name])
    allowed = {"phase": PHASES, "outcome": ("kill", "error"), "where": _WHERE.get(kind, ())}[name]
    return None if value in allowed else f"must be one of {', '.join(allowed)}"


def _whole_number_problem(value: Any, least: int, most: int) -> str | None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    return (
        None if whole and least <= value <= most else f"must be a whole number, {least} to {most}"
    )


def _number_problem(value: Any, least: float, most: float) -> str | None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    inside = number and least <= value <= most
    return None if inside else f"must be a number, {least:g} to {most:g}"


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
            select.select([reader], [], [], lasts_s)
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
