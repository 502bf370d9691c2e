"""Levels: what Holdfast does for a job, by what its program does for Holdfast.

Pure. A script or command starts at level 0 and reaches the others by attaching; recipes and
functions are at level 3 by their nature. The texts are shown to users, as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any


class Brings(StrEnum):
    """The kind of code that a spec brings."""

    RECIPE = "recipe"
    FUNCTION = "function"
    SCRIPT = "script"
    COMMAND = "command"
    RAY_TRAIN = "ray_train"

    @property
    def is_program(self) -> bool:
        """Whether the ranks run a program of the user, which has its own loop."""
        return self not in (Brings.RECIPE, Brings.FUNCTION)


class ProgramLevel(IntEnum):
    """How much a program works with Holdfast."""

    SCRIPT = 0
    PLUGIN = 1
    MEMORY_TIER = 2
    CONTEXT = 3


GIVES: Mapping[ProgramLevel, str] = {
    ProgramLevel.SCRIPT: (
        "Holdfast launches the program on all ranks, keeps its output, sees exits, errors and "
        "silence, and starts all ranks again after a fault. The program continues from its own "
        "checkpoints."
    ),
    ProgramLevel.PLUGIN: (
        "Holdfast also sees every step: it names the rank that causes a hang, accounts for lost "
        "time, draws metrics, and asks the program to save before a planned end."
    ),
    ProgramLevel.MEMORY_TIER: (
        "Holdfast also keeps the program's checkpoints in the memory of the node and, if the job "
        "has another node, of a partner, verified when they are loaded. A save takes milliseconds, "
        "so it can be made every few steps."
    ),
    ProgramLevel.CONTEXT: (
        "Holdfast runs the step loop: surviving ranks continue in place, with the same bits, and "
        "state is divided anew for another number of ranks."
    ),
}

_ATTACH = """import holdfast

job = holdfast.attach()  # no effect outside of Holdfast
job.step(step, loss=loss)  # after each step, on every rank"""
_PRINTED = r"""# Without a change of the code, steps that rank 0 prints are read (`holdfast run`):
#   --set 'program.metrics=(step|iter) (?P<step>\d+):? loss (?P<loss>[-+.e\d]+)'
# All of this level, with lines in the code:
"""
_TIER = """import holdfast.torch

tier = holdfast.torch.tier()  # keeps nothing outside of Holdfast
state = tier.load() or state  # at the start; for DCP: storage_reader=tier.at(tier.newest())
tier.save(step, state)  # every few steps, on every rank; for DCP: storage_writer=tier.at(step)"""
_CONTEXT = """ctx = holdfast.attach().context  # program: {context: true}
ctx.register(model=model, optimizer=optimizer)
for step in ctx.steps():
    for samples in ctx.batches(len(data)):
        ctx.backward(loss_of(model, data[samples]))
    ctx.step()"""
_FUNCTION = """def main(ctx):  # function: train:main
    ctx.register(model=model, optimizer=optimizer)
    for step in ctx.steps():
        for samples in ctx.batches(len(data)):
            ctx.backward(loss_of(model, data[samples]))
        ctx.step()"""
_REPORT = """ray.train.report({"loss": loss})  # after each step, on every rank"""
_REPORT_CHECKPOINT = (
    """ray.train.report({"loss": loss}, checkpoint=Checkpoint.from_directory(folder))"""
)
STEPS_BECOME_KNOWN_BY = (
    "`holdfast.attach().step(step)` after each step makes it known, in a Ray Train function "
    "`ray.train.report`; `program.metrics` reads the steps that are printed"
)
_LINES: Mapping[ProgramLevel, str] = {
    ProgramLevel.PLUGIN: _ATTACH,
    ProgramLevel.MEMORY_TIER: _TIER,
    ProgramLevel.CONTEXT: _CONTEXT,
}
_RAY_TRAIN_LINES: Mapping[ProgramLevel, str] = {
    ProgramLevel.PLUGIN: _REPORT,
    ProgramLevel.MEMORY_TIER: _REPORT_CHECKPOINT,
    ProgramLevel.CONTEXT: _FUNCTION,
}


@dataclass(frozen=True)
class NextLevel:
    """What the next level would bring, and how to reach it."""

    level: ProgramLevel
    gives: str
    lines: str
    """The lines to add to the program; of printed steps, to its job."""


def brings(spec: Mapping[str, Any]) -> Brings:
    """The kind of code that a stored spec brings; older specs lack the newer keys. A script that
    trains in the steps of a context is a function."""
    if spec.get("script") is not None and (spec.get("program") or {}).get("context"):
        return Brings.FUNCTION
    of_user = (kind for kind in Brings if kind is not Brings.RECIPE and spec.get(kind) is not None)
    return next(of_user, Brings.RECIPE)


def has_goodput(spec: Mapping[str, Any], attempt: int) -> bool:
    """Whether the time in steps is known. A program may never report one: its goodput is then not
    zero, but not known. `attempt`: of the newest step that was reported, 0 if none was."""
    return attempt > 0 or not brings(spec).is_program


def reads_steps(spec: Mapping[str, Any], level: ProgramLevel) -> bool:
    """Whether steps can be known: at level 0 only those that the job's spec has read."""
    program = spec.get("program") or {}
    is_read = program.get("metrics") is not None or program.get("event_files") is not None
    return level > ProgramLevel.SCRIPT or is_read


def level_of(kind: Brings, attempt: int, attached: Mapping[str, Any] | None) -> ProgramLevel | None:
    """The level of a job at its newest `attempt`; None: its program has not started yet.
    `attached`: the fields of its newest event `program.attached`, of any attempt."""
    if not kind.is_program:
        return ProgramLevel.CONTEXT
    if not attempt:
        return None
    level = (attached or {}).get("level", 0)
    return ProgramLevel(min(max(0, int(level)), max(ProgramLevel)))


def next_level(kind: Brings, level: ProgramLevel | None, *, shows_steps: bool) -> NextLevel | None:
    """What is worth adding next at `level`, or None: nothing. `shows_steps`: a step of the program
    has been seen; a program may reach a level without the line that shows its steps."""
    if level is None or level is max(ProgramLevel):
        return None
    is_blind = level > ProgramLevel.SCRIPT and not shows_steps
    wanted = ProgramLevel.PLUGIN if is_blind else ProgramLevel(level + 1)
    lines = (_RAY_TRAIN_LINES if kind is Brings.RAY_TRAIN else _LINES)[wanted]
    is_unread = level is ProgramLevel.SCRIPT and not shows_steps
    if is_unread and kind is not Brings.RAY_TRAIN:
        lines = _PRINTED + lines
    return NextLevel(wanted, GIVES[wanted], lines)
