"""The faults of a spec that brings a program: a `script`, a `command` or a Ray Train function.

Pure. The program has its own model, data and loop: sections about them are ignored, without fault.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

from holdfast_workers.program_metrics.metric_lines import pattern_fault
from holdfast_workers.spec import ProgramSpec, SpecFault, TrainingSpec

BROUGHT = ("function", "script", "command", "ray_train")
"""The keys of which a spec has at most one; without any it has a recipe."""
MODULE_ATTRIBUTE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def program_faults(spec: TrainingSpec, code: str | None) -> list[SpecFault]:
    """Every fault of the keys that name the program, and of `program`. `code` is the field of the
    job spec."""
    found = [*_exclusion_faults(spec), *_section_faults(spec)]
    if spec.script is not None:
        found += _script_faults(spec.script, code)
    if spec.command == ():
        found.append(_fault("command", "it is empty: write the program and its arguments"))
    if spec.ray_train is not None and not MODULE_ATTRIBUTE.fullmatch(spec.ray_train):
        message = f"{spec.ray_train!r} is not a function reference: write package.module:name"
        found.append(_fault("ray_train", message))
    found += _ray_run_faults(spec)
    return found


def _exclusion_faults(spec: TrainingSpec) -> Iterator[SpecFault]:
    given = [name for name in BROUGHT if getattr(spec, name) is not None]
    for name in given[1:]:
        yield _fault(name, f"a job runs either {given[0]} or {name}: remove one of them", given[0])
    if given and spec.recipe != "pretrain":
        yield _fault(
            "recipe", f"a job has either a recipe or a {given[0]}: remove one of them", given[0]
        )


def _script_faults(words: Sequence[str], code: str | None) -> Iterator[SpecFault]:
    if not words:
        yield _fault("script", "it is empty: write the path of a Python file and its arguments")
        return
    if words[0] == "-m":
        if len(words) < 2 or not _MODULE.fullmatch(words[1]):
            yield _fault("script", "after -m comes the name of a module: -m package.module")
        return
    first = PurePosixPath(words[0])
    if words[0] in ("python", "python3", "torchrun") or words[0].startswith("-"):
        message = f"it begins with {words[0]!r}: begin with the file, such as train.py --lr 3e-4"
        yield _fault("script", message)
    elif first.is_absolute() or ".." in first.parts:
        message = f"{words[0]!r} is outside of the code folder: give a path in the folder of `code`"
        yield _fault("script", message)
    elif code is None:
        message = f"the nodes do not have {words[0]!r}: set `code` to the folder that contains it"
        yield _fault("code", message)


def _ray_run_faults(spec: TrainingSpec) -> Iterator[SpecFault]:
    path = spec.ray_run.storage_path
    if path is not None and ("://" in path or "\0" in path):
        message = f"{path!r} is not a folder: name one that all nodes share"
        yield _fault("ray_run.storage_path", message)
    datasets = spec.ray_run.datasets
    if datasets is not None and not MODULE_ATTRIBUTE.fullmatch(datasets):
        message = f"{datasets!r} is not a function reference: write package.module:name"
        yield _fault("ray_run.datasets", message)


def _section_faults(spec: TrainingSpec) -> Iterator[SpecFault]:
    program = spec.program
    if program.context:
        yield from _context_faults(spec)
    for at, name in enumerate(program.preload):
        if not _MODULE.fullmatch(name):
            message = f"{name!r} is not the name of a module: write it as in an import statement"
            yield _fault(f"program.preload.{at}", message)
    if program.metrics is not None and (why := pattern_fault(program.metrics)):
        yield _fault("program.metrics", why)
    if program.event_files is not None:
        folder = PurePosixPath(program.event_files)
        if "\0" in program.event_files or ".." in folder.parts:
            message = f"{program.event_files!r} is not in the code folder: give a path below it"
            yield _fault("program.event_files", message)


def _context_faults(spec: TrainingSpec) -> Iterator[SpecFault]:
    program, only = spec.program, "only a forked script has a training context:"
    if spec.script is None:
        yield _fault("program.context", f"{only} remove it, or name a `script`", "script")
    elif not program.fork:
        message = f"{only} remove `program.fork: false`, or `context`"
        yield _fault("program.context", message, "program.fork")
    for name, field in ProgramSpec.model_fields.items():
        if name in ("context", "preload", "fork") or getattr(program, name) == field.default:
            continue
        message = f"{name} has no effect with `program.context`: remove it" + (
            ", and set train.steps" if name == "steps" else ""
        )
        yield _fault(f"program.{name}", message, "program.context")


def _fault(path: str, message: str, *beside: str) -> SpecFault:
    return SpecFault(path=path, message=message, beside=beside)
