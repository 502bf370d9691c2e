"""The kinds of injected faults, each declared once, and the requests for them.

Pure and public: REST, command line, dashboard, supervisor, agents and workers all derive from the
declarations in `FaultKind` what a kind is called, whom it hits, which parameters it has and how it
is carried out. `injection_faults` lists every error in a request. No fault runs without a request:
`fault_injection/fault_points.py` decides when a fault of a rank is due, and
`fault_injection/process_faults.py` and `fault_injection/tensor_faults.py` carry it out;
`fault_injection/orders.py` carries out those of a node.

`python -m holdfast_workers.fault_injection.kinds` prints the declarations for the dashboard.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from functools import partial
from signal import SIGABRT, SIGKILL, SIGSEGV, SIGSTOP, Signals
from typing import Any, Self

from holdfast_workers.spec import SpecFault

PHASES = (
    *("forming", "rendezvous", "restore"),
    *("load", "forward", "backward", "agree", "optimizer", "evaluation", "checkpoint"),
    *("memory", "committed", "save", "saved"),
)
"""Points of a rank at which a fault may be requested (`Fault points` in the architecture)."""


class Victim(StrEnum):
    """The process that executes a fault."""

    RANK = "rank"  # the process of the rank
    NODE = "node"  # the agent of the rank's node
    NODES = "nodes"  # every agent of the job
    SUPERVISOR = "supervisor"


class FaultGroup(StrEnum):
    """The headings under which the dashboard lists the kinds."""

    PROCESS = "The rank's process"
    HANG = "The rank hangs or slows down"
    NUMBERS = "Numbers"
    NODE = "The node"
    JOB = "Around the job"


@dataclass(frozen=True)
class FaultParameter:
    """A parameter of a kind: a field of `Injection`. Its values are numbers within `limits` (whole
    ones, if the limits are), one of the `words`, or any name."""

    name: str
    label: str
    default: float | str | None = None
    unset: str = ""
    """What the absence means, if it is no default value."""
    limits: tuple[float, float] | None = None
    words: tuple[str, ...] = ()

    def problem(self, value: Any) -> str | None:
        """Why the value is not allowed."""
        if self.words:
            return None if value in self.words else f"must be one of {', '.join(self.words)}"
        if self.limits is None:
            return None if isinstance(value, str) and 0 < len(value) <= 200 else "must be a name"
        least, most = self.limits
        whole = isinstance(least, int)
        if type(value) in ((int,) if whole else (int, float)) and least <= value <= most:
            return None
        return f"must be a {'whole ' if whole else ''}number, {least:.16g} to {most:.16g}"


@dataclass(frozen=True)
class FaultKindSpec:
    """What a kind is, whom it hits, and how it is carried out."""

    group: FaultGroup
    label: str
    detail: str = ""
    """Follows the label, after a comma, where there is room for it."""
    victim: Victim = Victim.RANK
    own: tuple[FaultParameter, ...] = ()
    """The parameters beside rank, step and phase."""
    signal: Signals | None = None
    """The signal of a fault that is one. At once, the agent sends it to the rank; at a step or
    phase, the process sends it to itself."""
    whole_process: bool = False
    """Whether any thread of the process can carry it out, at any time; true of a signal."""
    in_tensors: bool = False
    """Whether it changes live tensors; it then has points of its own, and no phase."""
    point: str = "forward"
    """Where it fires, if the request names no phase."""
    point_of: Mapping[str, str] = field(default_factory=dict)
    """The points of values of `where`, if they differ from `point`."""

    @property
    def has_rank(self) -> bool:
        return self.victim in (Victim.RANK, Victim.NODE)

    @property
    def any_thread(self) -> bool:
        return self.whole_process or self.signal is not None

    @property
    def parameters(self) -> tuple[FaultParameter, ...]:
        of_rank = self.victim is Victim.RANK
        given = (self.has_rank, RANK), (of_rank, AT_STEP), (of_rank and not self.in_tensors, PHASE)
        return (*(parameter for has_it, parameter in given if has_it), *self.own)


RANK = FaultParameter("rank", "Rank", unset="random", limits=(0, 2**31))
"""The world of the job has a narrower limit."""
AT_STEP = FaultParameter("at_step", "At step", unset="immediately", limits=(1, 2**53))
PHASE = FaultParameter("phase", "In phase", unset="any", words=PHASES)
TARGET = FaultParameter("target", "Module or parameter", unset="the first")


def _where(*words: str) -> FaultParameter:
    return FaultParameter("where", "Where", words[0], words=words)


def _duration(default: float | None = None) -> FaultParameter:
    limits = (0.001, 86400.0)
    return FaultParameter("duration_s", "Duration, seconds", default, "unlimited", limits)


def _kind(
    group: FaultGroup, name: str, label: str, detail: str = "", **how: Any
) -> tuple[str, FaultKindSpec]:
    return name, FaultKindSpec(group, label, detail, **how)


_process = partial(_kind, FaultGroup.PROCESS)
_hang = partial(_kind, FaultGroup.HANG)
_numbers = partial(_kind, FaultGroup.NUMBERS, in_tensors=True)
_node = partial(_kind, FaultGroup.NODE, victim=Victim.NODE)
_job = partial(_kind, FaultGroup.JOB)


class FaultKind(StrEnum):
    """The faults that can be injected, each with its declaration."""

    spec: FaultKindSpec

    def __new__(cls, name: str, spec: FaultKindSpec | None = None) -> Self:
        assert spec is not None
        kind = str.__new__(cls, name)
        kind._value_, kind.spec = name, spec
        return kind

    KILL = _process("kill", "Killed with SIGKILL", signal=SIGKILL)
    SEGFAULT = _process(
        "segfault", "Segmentation fault", "SIGSEGV, without a core file", signal=SIGSEGV
    )
    ABORT = _process("abort", "Aborted with SIGABRT", "without a core file", signal=SIGABRT)
    EXIT = _process(
        "exit",
        "Ends by itself",
        own=(FaultParameter("exit_code", "Exit code", 1, limits=(0, 255)),),
        whole_process=True,
    )
    RAISE = _process("raise", "Raises an exception", "as if the user's program had raised it")
    OOM = _process(
        "oom",
        "Runs out of memory",
        "allocating until none is left (capped); then raises `MemoryError` (`outcome: error`) or "
        "gets SIGKILL, like from the kernel (`outcome: kill`, the default)",
        own=(FaultParameter("outcome", "Outcome", "kill", words=("kill", "error")),),
    )
    STOP = _hang("stop", "Stopped with SIGSTOP", "every thread of it", signal=SIGSTOP)
    GIL = _hang(
        "gil",
        "Holds Python's GIL in C",
        "so that no other thread of the rank runs",
        own=(_duration(),),
        whole_process=True,
    )
    LOOP = _hang("loop", "Loops forever", "in the training thread", own=(_duration(),))
    COLLECTIVE = _hang(
        "collective",
        "Does not enter its next collective",
        "or late with `duration_s`",
        own=(_duration(),),
        point="agree",
    )
    READ = _hang(
        "read",
        "Blocks in a read",
        "from a pipe that never gets data",
        own=(_duration(),),
    )
    SLOW = _hang(
        "slow",
        "Computes several times slower",
        "`factor` times",
        own=(
            FaultParameter("factor", "Slowdown factor", 2, limits=(1.0, 1000.0)),
            FaultParameter("steps", "Number of steps", 1, limits=(1, 2**31)),
        ),
    )
    NAN = _numbers(
        "nan",
        "NaN in an output or gradient",
        "of the model, or of the module `target`, in one micro-batch; `where: gradient`: in the "
        "gradient of that output",
        own=(
            _where("output", "gradient"),
            TARGET,
            FaultParameter("micro_batch", "Micro-batch", unset="the first", limits=(0, 2**31)),
        ),
    )
    BIT_FLIP = _numbers(
        "bit_flip",
        "A bit of a tensor flips",
        "of a local one (`where`: gradient, parameter or moment; `target`: the parameter)",
        own=(
            _where("gradient", "parameter", "moment"),
            TARGET,
            # In the 23-bit mantissa of a float32: no loss shows it, and every digest does.
            FaultParameter("bit", "Bit", 20, limits=(0, 31)),
        ),
        point="agree",
        point_of={"parameter": "checkpoint", "moment": "checkpoint"},
    )
    AGENT_DEATH = _node("agent_death", "The node agent is killed with its ranks")
    NODE_LOSS = _node(
        "node_loss", "The node is lost with all its memory", "on the embedded cluster its raylet"
    )
    PARTITION = _node(
        "partition",
        "Network partition",
        "of those links that the node's operator allows to be cut",
        own=(_duration(10),),
    )
    RESET = _node("reset", "Its connections are reset", "all to its data port, as by a firewall")
    XID = _node(
        "xid",
        "The accelerator reports an XID error",
        "to the node's health probe",
        own=(FaultParameter("xid", "XID", 48, limits=(1, 1023)),),
    )
    REMOTE_DOWN = _job(
        "remote_down",
        "The remote tier refuses every call",
        "of all nodes of the job",
        victim=Victim.NODES,
        own=(_duration(10),),
    )
    DISK_FULL = _job(
        "disk_full",
        "The remote tier has no space",
        "for writes of any node of the job",
        victim=Victim.NODES,
        own=(_duration(10),),
    )
    SUPERVISOR_DEATH = _job(
        "supervisor_death", "The job's supervisor is killed", victim=Victim.SUPERVISOR
    )


@dataclass(frozen=True)
class Injection:
    """One requested fault. None means no restriction, or the default of the kind."""

    kind: FaultKind
    rank: int | None = None
    at_step: int | None = None
    phase: str | None = None
    duration_s: float | None = None
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
        return self.kind.spec.victim

    @property
    def at_once(self) -> bool:
        """Whether it fires as soon as its victim receives it, at any point."""
        return self.at_step is None and self.phase is None and self.micro_batch is None

    @property
    def point(self) -> str:
        """The point of the rank at which it fires."""
        spec = self.kind.spec
        return self.phase or spec.point_of.get(self.where or "", spec.point)

    def value(self, name: str) -> Any:
        """A parameter of the kind as requested, else its default."""
        given = getattr(self, name)
        defaults = {parameter.name: parameter.default for parameter in self.kind.spec.own}
        return defaults[name] if given is None else given

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
        kind = FaultKind(given.pop("kind", ""))
    except ValueError:
        known = ", ".join(FaultKind)
        return [*faults, SpecFault(path="kind", message=f"must be one of {known}")]
    parameters = {parameter.name: parameter for parameter in kind.spec.parameters}
    if "rank" in parameters:
        parameters["rank"] = replace(RANK, limits=(0, world_size - 1))
    for name in (name for name in given if name in names):
        problem = (
            parameters[name].problem(given[name])
            if name in parameters
            else f"{kind} does not have this parameter"
        )
        faults += [SpecFault(path=name, message=problem)] if problem else []
    return faults


def program_faults(fault: Injection) -> list[SpecFault]:
    """Why the fault cannot be injected into a user's program, which has none of Holdfast's code:
    a signal can be sent to it at once."""
    if fault.victim is not Victim.RANK:
        return []
    if fault.kind.spec.signal is None:
        known = ", ".join(kind for kind in FaultKind if kind.spec.signal is not None)
        message = f"{fault.kind} cannot be injected into a program of the user: use one of {known}"
        return [SpecFault(path="kind", message=message)]
    given = {"at_step": fault.at_step, "phase": fault.phase, "micro_batch": fault.micro_batch}
    return [
        SpecFault(path=name, message=f"a fault of a program has no {name}: leave it out")
        for name, value in given.items()
        if value is not None
    ]


def declarations() -> dict[str, Any]:
    """The kinds as the dashboard offers them, as JSON."""
    return {
        kind: {
            "label": kind.spec.label,
            "group": kind.spec.group,
            "parameters": [asdict(parameter) for parameter in kind.spec.parameters],
        }
        for kind in FaultKind
    }


if __name__ == "__main__":
    print(json.dumps(declarations()))
