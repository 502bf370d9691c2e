"""The faults of a spec that brings a program: a `script`, a `command` or a Ray Train function.

Pure. A program has its own model, data and loop: fields about them are refused (`UNUSED`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import PurePosixPath
from typing import Any

from holdfast_service.job_model.program_levels import Brings, brings
from holdfast_workers.program_metrics.metric_lines import pattern_fault
from holdfast_workers.spec import OF_PUBLISHED, OF_SOURCES, ProgramSpec, SpecFault, TrainingSpec

BROUGHT = ("function", "script", "command", "ray_train")
"""The keys of which a spec has at most one; without any it has a recipe."""
MODULE_ATTRIBUTE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
PROGRAMS = frozenset(kind for kind in Brings if kind.is_program)
"""The kinds with a model, data and a loop of their own."""


@dataclass(frozen=True)
class UnusedFields:
    """Fields, or whole sections, that these kinds of code make no use of. One that is set would
    look like a promise, so it is refused; its default says nothing, and is in every stored spec."""

    kinds: frozenset[Brings]
    paths: tuple[str, ...]
    instead: str
    """What to do."""


UNUSED = (
    UnusedFields(
        PROGRAMS,
        ("guards",),
        "guards judge the steps of a recipe or a context, and a program has its own loop: check "
        "the loss there, or train in the steps of a context (`function`, or `program.context`)",
    ),
    UnusedFields(
        PROGRAMS,
        ("checks", "checkpoint.digest_every_steps"),
        "only the state of a recipe or a context is compared, a program's is its own: remove it",
    ),
    UnusedFields(
        PROGRAMS,
        ("model", "data"),
        "a program has its own model and data: remove it, and name them in its arguments",
    ),
    UnusedFields(
        frozenset({Brings.FUNCTION}),
        ("data.sources", *(f"data.{name}" for name in OF_SOURCES)),
        "a function reads its own data, and no tokens are prepared for it: remove it, and name the "
        "data in `config`",
    ),
    UnusedFields(
        PROGRAMS,
        ("train",),
        "a program has its own loop: remove it, give such values in its arguments, and for "
        "displays set `program.steps`",
    ),
    UnusedFields(
        PROGRAMS,
        (
            "parallel.zero",
            "parallel.context_method",
            "parallel.schedule",
            "parallel.stages_per_rank",
            "parallel.sequence_parallel",
            "parallel.vocabulary_parallel",
        ),
        "it divides built-in models only, and a program divides its model itself: remove it",
    ),
    UnusedFields(
        PROGRAMS,
        (
            "checkpoint.remote.every_steps",
            "checkpoint.remote.keep",
            "checkpoint.remote.keep_every",
            "checkpoint.remote.keep_best",
            "checkpoint.overhead_target",
            "timeouts.load_s",
            "timeouts.save_s",
            "timeouts.publish_s",
        ),
        "a program saves its own checkpoints, when and where it likes: remove it",
    ),
    UnusedFields(
        PROGRAMS,
        ("timeouts.first_step_s", "detection.limits"),
        "how long a program may show no sign of life is `program.silence_s`, and how long one that "
        "reports steps may take for one `program.step_limit_s`: set these",
    ),
    UnusedFields(
        PROGRAMS,
        ("detection.collective_timeout_s",),
        "a program sets this itself, by the `timeout` of init_process_group (in a Ray Train run "
        "`ray_run.timeout_s`): remove it",
    ),
    UnusedFields(
        PROGRAMS,
        ("init_from",),
        "a program loads its own checkpoints: remove it, and name one in its arguments",
    ),
    UnusedFields(
        PROGRAMS,
        ("evaluate",),
        "a program evaluates in its own loop: remove it",
    ),
    UnusedFields(
        frozenset({Brings.FUNCTION}),
        ("evaluate",),
        "a function evaluates in its own loop: remove it, and give the result to its step, as "
        "`metrics={'eval_loss': ...}`",
    ),
    UnusedFields(
        frozenset({Brings.SCRIPT, Brings.COMMAND}),
        ("config",),
        "only a `function` or a `ray_train` function gets it: remove it, and give such values in "
        "the arguments of a program, or in `env`",
    ),
    UnusedFields(
        frozenset(Brings) - {Brings.RAY_TRAIN},
        ("ray_run",),
        "only a `ray_train` function runs as a Ray Train run: remove it",
    ),
    UnusedFields(
        frozenset({Brings.RECIPE, Brings.FUNCTION}),
        ("program",),
        "it is about a `script`, a `command` or a `ray_train` function: remove it",
    ),
    UnusedFields(
        frozenset({Brings.COMMAND}),
        ("program.preload",),
        "a command runs in a process of its own, which imports for itself: remove it",
    ),
)


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
    if spec.function_name is not None and spec.model.source is not None:
        message = (
            "a function has its own model, and no published weights are read for it: remove it, "
            "and name the folder in `config`"
        )
        found.append(_fault("model.from", message, *BROUGHT))
    return [*found, *_unused_faults(spec)]


def _unused_faults(spec: TrainingSpec) -> Iterator[SpecFault]:
    given = [name for name in BROUGHT if getattr(spec, name) is not None]
    if len(given) > 1:
        return
    for path, instead in _unused_paths(spec):
        if _at(spec, path) != default_of(type(spec), path):
            yield _fault(path, instead, *BROUGHT)


def used_fields(spec: TrainingSpec) -> dict[str, Any]:
    """The spec as plain values, without the fields that mean nothing for the code of the job."""
    document = known_fields(spec)
    absent = [name for name in BROUGHT if document[name] is None]
    absent += ["recipe"] if len(absent) < len(BROUGHT) else []
    for path in (*absent, *(path for path, _ in _unused_paths(spec))):
        *sections, name = path.split(".")
        reduce(dict.__getitem__, sections, document).pop(name, None)
    return document


def known_fields(spec: TrainingSpec) -> dict[str, Any]:
    """The spec as plain values, without the sizes of a published model that is not read yet."""
    document = spec.model_dump(mode="json")
    for name in () if spec.model.has_sizes else OF_PUBLISHED:
        del document["model"][name]
    return document


def _unused_paths(spec: TrainingSpec) -> Iterator[tuple[str, str]]:
    """The fields that mean nothing for the code of the job, each with what to do instead. `program`
    means something for a script in the steps of a context, which is a function else."""
    kind = brings(spec.model_dump(include={*BROUGHT, "program"}))
    has_context = spec.script is not None or spec.program.context
    for fields in UNUSED:
        for path in fields.paths if kind in fields.kinds else ():
            if path != "program" or not has_context:
                yield path, fields.instead


def default_of(model: type[TrainingSpec], path: str) -> Any:
    """The default of the field or section at `path`."""
    first, *rest = path.split(".")
    default = model.model_fields[first].get_default(call_default_factory=True)
    return _at(default, ".".join(rest)) if rest else default


def _at(section: Any, path: str) -> Any:
    return reduce(getattr, path.split("."), section)


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
