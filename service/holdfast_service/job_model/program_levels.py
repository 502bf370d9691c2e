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
    """What a spec brings to be run."""

    RECIPE = "recipe"
    FUNCTION = "function"
    SCRIPT = "script"
    COMMAND = "command"
    RAY_TRAIN = "ray_train"

    @property
    def is_program(self) -> bool:
        """Whether the ranks run a program of the user, which has its own loop."""
        return self not in (Brings.RECIPE, Brings.FUNCTION)


class Level(IntEnum):
    """How much a program works with Holdfast."""

    SCRIPT = 0
    PLUGIN = 1
    MEMORY_TIER = 2
    CONTEXT = 3


GIVES: Mapping[Level, str] = {
    Level.SCRIPT: "Holdfast launches the program on all ranks, keeps its output, sees exits, "
    "errors and silence, and starts all ranks again after a fault. The program continues from its "
    "own checkpoints.",
    Level.PLUGIN: "Holdfast also sees every step: it names the rank that causes a hang and slow "
    "ranks, accounts for lost time, draws metrics, and asks the program to save before a planned "
    "end.",
    Level.MEMORY_TIER: "Holdfast also keeps the program's checkpoints in the memory of the node "
    "and of a partner, verified when they are loaded: after a fault a step or two are lost.",
    Level.CONTEXT: "Holdfast runs the step loop: surviving ranks continue in place, with the same "
    "bits, and the number of ranks may change.",
}

_ATTACH = """import holdfast

job = holdfast.attach()  # no effect outside of Holdfast
job.step(step, loss=loss)  # after each step, on every rank"""
_TIER = """from holdfast.torch import tier

memory = tier()  # no effect outside of Holdfast
dcp.save(state, storage_writer=memory)
dcp.load(state, storage_reader=memory)"""
_FUNCTION = """def train(ctx):  # function: my_module:train
    ctx.register(model=model, optimizer=optimizer)
    for batch in ctx.batches(...):
        ..."""
_REPORT = """ray.train.report({"loss": loss})  # after each step, on every rank"""
_REPORT_CHECKPOINT = (
    """ray.train.report({"loss": loss}, checkpoint=Checkpoint.from_directory(folder))"""
)
_LINES: Mapping[Level, str] = {
    Level.PLUGIN: _ATTACH,
    Level.MEMORY_TIER: _TIER,
    Level.CONTEXT: _FUNCTION,
}
_RAY_TRAIN_LINES: Mapping[Level, str] = {
    Level.PLUGIN: _REPORT,
    Level.MEMORY_TIER: _REPORT_CHECKPOINT,
    Level.CONTEXT: _FUNCTION,
}


@dataclass(frozen=True)
class NextLevel:
    """What the next level would bring, and how to reach it."""

    level: Level
    gives: str
    lines: str
    """What to add to the program."""


def brings(spec: Mapping[str, Any]) -> Brings:
    """What a stored spec brings; older specs lack the newer keys."""
    of_user = (kind for kind in Brings if kind is not Brings.RECIPE and spec.get(kind) is not None)
    return next(of_user, Brings.RECIPE)


def level_of(kind: Brings, attempt: int, attached: Mapping[str, Any] | None) -> Level | None:
    """The level of a job at its newest `attempt`; None: its program has not started yet.
    `attached`: the fields of its newest event `program.attached`, of any attempt."""
    if not kind.is_program:
        return Level.CONTEXT
    if not attempt:
        return None
    level = (attached or {}).get("level", 0)
    return Level(min(max(0, int(level)), max(Level)))


def next_level(kind: Brings, level: Level | None) -> NextLevel | None:
    """None: there is none."""
    higher = Level.SCRIPT if level is None else level + 1
    if level is None or higher > max(Level):
        return None
    wanted = Level(higher)
    lines = _RAY_TRAIN_LINES if kind is Brings.RAY_TRAIN else _LINES
    return NextLevel(wanted, GIVES[wanted], lines[wanted])
