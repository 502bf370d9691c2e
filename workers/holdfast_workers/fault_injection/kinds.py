"""Faults on request: which kinds there are, what each may be told, and how a process does it.

The vocabulary is pure and public: `Injection` is what REST, command line, supervisor, agents and
workers speak of, and `faults_of` names everything that is wrong with one. `carry_out` is the deed
itself, in the thread that calls it; what needs the living tensors is in
`fault_injection/tensor_faults.py`. Nothing here runs unless somebody asked for it: see
`fault_injection/fault_points.py` for when a fault is due.
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

from holdfast_workers.spec import Fault

OOM_CAP_BYTES = 256 * 1024 * 1024
"""How much more a rank that runs out of memory may take: the machine must survive it."""

OOM_PIECE_BYTES = 16 * 1024 * 1024
FOR_EVER_S = 1e9


STORAGE_S = 10.0
"""How long the remote tier fails, if it was not said."""

PARTITION_S = 10.0
"""How long a link is down, if it was not said."""


class InjectedError(Exception):
    """What an injected `raise` raises: to everybody else an error of the user's program."""


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
    XID = "xid"
    REMOTE_DOWN = "remote_down"
    DISK_FULL = "disk_full"
    SUPERVISOR_DEATH = "supervisor_death"


class Victim(StrEnum):
    """Who carries a fault out."""

    RANK = "rank"  # the process of the rank
    NODE = "node"  # the agent of the node that has the rank
    NODES = "nodes"  # every agent of the job
    SUPERVISOR = "supervisor"


@dataclass(frozen=True)
class KindOfFault:
    """What a kind does, in words; who does it; what it may be told beside rank, step and phase."""

    what: str
    victim: Victim = Victim.RANK
    takes: frozenset[str] = frozenset()


def _kind(what: str, *takes: str, victim: Victim = Victim.RANK) -> KindOfFault:
    return KindOfFault(what, victim, frozenset(takes))


KINDS: Mapping[FaultKind, KindOfFault] = {
    FaultKind.KILL: _kind("SIGKILL"),
    FaultKind.SEGFAULT: _kind("SIGSEGV, without a core file"),
    FaultKind.ABORT: _kind("SIGABRT, without a core file"),
    FaultKind.EXIT: _kind("the process ends by itself", "exit_code"),
    FaultKind.RAISE: _kind("an exception, as if the user's program had raised it"),
    FaultKind.OOM: _kind(
        "memory is taken until there is no more (capped), then `MemoryError` (`outcome: error`) or "
        "SIGKILL, as the kernel would (`outcome: kill`, the default)",
        "outcome",
    ),
    FaultKind.STOP: _kind("SIGSTOP: every thread stands still"),
    FaultKind.GIL: _kind(
        "a C call that keeps Python's lock: no other thread of the rank runs", "duration_s"
    ),
    FaultKind.LOOP: _kind("the training thread runs in circles", "duration_s"),
    FaultKind.COLLECTIVE: _kind(
        "the rank does not enter its next collective; with `duration_s` it enters late",
        "duration_s",
    ),
    FaultKind.READ: _kind("the training thread reads what nobody writes", "duration_s"),
    FaultKind.SLOW: _kind("the rank computes `factor` times as long", "factor", "steps"),
    FaultKind.NAN: _kind(
        "not a number in the output of the model, or of the module `target`, in one micro-batch; "
        "`where: gradient`: in the gradient of that output",
        "where",
        "target",
        "micro_batch",
    ),
    FaultKind.BIT_FLIP: _kind(
        "one bit of a local tensor (`where`: gradient, parameter or moment; `target`: of which "
        "parameter) is another",
        "where",
        "target",
        "bit",
    ),
    FaultKind.AGENT_DEATH: _kind(
        "SIGKILL of the node's agent, its ranks included", victim=Victim.NODE
    ),
    FaultKind.NODE_LOSS: _kind(
        "the rank's node is gone with all its memory (on the embedded cluster: its raylet)",
        victim=Victim.NODE,
    ),
    FaultKind.PARTITION: _kind(
        "the links of the rank's node are down (such as its operator has named for it)",
        "duration_s",
        victim=Victim.NODE,
    ),
    FaultKind.XID: _kind(
        "the node's health probe sees an XID of its accelerator", "xid", victim=Victim.NODE
    ),
    FaultKind.REMOTE_DOWN: _kind(
        "the remote tier refuses every call of the job's nodes", "duration_s", victim=Victim.NODES
    ),
    FaultKind.DISK_FULL: _kind(
        "the remote tier has no space for what the job's nodes write",
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
"""Points of a rank at which a fault may be wanted (`Fault points` in the architecture)."""

BY_SIGNAL = {
    FaultKind.KILL: signal.SIGKILL,
    FaultKind.SEGFAULT: signal.SIGSEGV,
    FaultKind.ABORT: signal.SIGABRT,
    FaultKind.STOP: signal.SIGSTOP,
}
"""What an agent does to a rank from outside, whatever the rank is at."""

BY_ANY_THREAD = frozenset({*BY_SIGNAL, FaultKind.EXIT, FaultKind.GIL})
"""What befalls a whole process: its control thread may do it, whatever training is at."""

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
    """One fault that somebody wants. What is None is not restricted, or has its kind's default."""

    kind: FaultKind
    rank: int | None = None
    at_step: int | None = None
    phase: str | None = None
    duration_s: float | None = None
    """How long it lasts; None: for ever, of the remote tier `STORAGE_S`, of links `PARTITION_S`."""
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
        """Whether it is to happen as soon as its victim hears of it, wherever it stands."""
        return self.at_step is None and self.phase is None and self.micro_batch is None

    def document(self) -> dict[str, Any]:
        """As JSON, without what is None."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Injection:
        """From a document that `faults_of` finds nothing wrong with."""
        return cls(**{**document, "kind": FaultKind(document["kind"])})

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.document().items())


def faults_of(document: Mapping[str, Any], world_size: int) -> list[Fault]:
    """Everything that is wrong with a wanted fault, at its path."""
    names = {one.name for one in fields(Injection)}
    found = [
        Fault(path=str(name), message="there is no such field")
        for name in document
        if name not in names
    ]
    given = {name: value for name, value in document.items() if value is not None}
    try:
        kind = FaultKind(given.get("kind", ""))
    except ValueError:
        known = ", ".join(FaultKind)
        return [*found, Fault(path="kind", message=f"must be one of {known}")]
    for name, value in given.items():
        if name in names and name != "kind":
            wrong = _wrong(kind, name, value, world_size)
            found += [Fault(path=name, message=wrong)] if wrong else []
    return found


def carry_out(fault: Injection, point: str) -> None:
    """Do it, here and now, in this thread. Returns if it does not last."""
    print(f"injected fault: {fault} (at {point})", flush=True)
    lasts_s = FOR_EVER_S if fault.duration_s is None else fault.duration_s
    match fault.kind:
        case FaultKind.KILL | FaultKind.SEGFAULT | FaultKind.ABORT | FaultKind.STOP:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.kill(os.getpid(), BY_SIGNAL[fault.kind])
        case FaultKind.EXIT:
            os._exit(1 if fault.exit_code is None else fault.exit_code)
        case FaultKind.RAISE:
            raise InjectedError(f"planned failure at {point}")
        case FaultKind.OOM:
            _run_out_of_memory(kill=fault.outcome != "error")
        case FaultKind.GIL:
            _hold_the_lock(lasts_s)
        case FaultKind.LOOP:
            until = time.monotonic() + lasts_s
            while time.monotonic() < until:
                pass
        case FaultKind.COLLECTIVE:
            time.sleep(lasts_s)
        case FaultKind.READ:
            _read_what_nobody_writes(fault.duration_s)
        case _:
            raise ValueError(f"a process cannot carry out {fault.kind} by itself")


def _wrong(kind: FaultKind, name: str, value: Any, world_size: int) -> str | None:
    victim = KINDS[kind].victim
    takes = set(KINDS[kind].takes)
    takes |= {"rank"} if victim in (Victim.RANK, Victim.NODE) else set()
    takes |= {"at_step", "phase"} if victim is Victim.RANK else set()
    if name not in takes:
        return f"{kind} does not take it"
    if name == "target":
        return None if isinstance(value, str) and 0 < len(value) <= 200 else "must be a name"
    if name in _NUMBERS:
        return _no_number(value, *_NUMBERS[name])
    whole = {**_WHOLE_NUMBERS, "rank": (0, world_size - 1)}
    if name in whole:
        return _not_in(value, *whole[name])
    words = {"phase": PHASES, "outcome": ("kill", "error"), "where": _WHERE.get(kind, ())}[name]
    return None if value in words else f"must be one of {', '.join(words)}"


def _not_in(value: Any, least: int, most: int) -> str | None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    return (
        None if whole and least <= value <= most else f"must be a whole number, {least} to {most}"
    )


def _no_number(value: Any, least: float, most: float) -> str | None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    inside = number and least <= value <= most
    return None if inside else f"must be a number, {least:g} to {most:g}"


def _hold_the_lock(lasts_s: float) -> None:
    """`PyDLL` does not let go of the interpreter's lock; a signal's interruption is slept off."""
    left_us = int(min(lasts_s, FOR_EVER_S / 2) * 1e6)
    libc = ctypes.PyDLL(None)
    while left_us > 0:
        piece_us = min(left_us, 2_000_000_000)
        if libc.usleep(piece_us) != 0:
            continue
        left_us -= piece_us


def _read_what_nobody_writes(lasts_s: float | None) -> None:
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
    """Under a limit of this process alone, which is taken back if it survives."""
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
