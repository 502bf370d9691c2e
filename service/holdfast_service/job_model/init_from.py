"""What `init_from` means: which checkpoint a job asks for, and whether it can begin with it. Pure.

A reference names a job (by id, or the newest of a name) and perhaps a step, or a folder by its
URI. Whether the state fits is judged from what its manifest tells, as far as it tells it; what it
does not tell the workers find out when they load it, before the first step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast_service.job_model.job_spec import JobSpec
from holdfast_workers.data.corpus import BYTE_VOCABULARY
from holdfast_workers.models.llama_parameters import parameter_shapes
from holdfast_workers.protocol.messages import STOCK_URI, InitPart
from holdfast_workers.spec import TrainingSpec

_LISTED = 3


@dataclass(frozen=True)
class JobReference:
    """A job by id or name; `step` None: its newest checkpoint."""

    job: str
    step: int | None


@dataclass(frozen=True)
class FolderReference:
    """A checkpoint's folder; `stock` if the user says that stock torch wrote it."""

    uri: str
    stock: bool


@dataclass(frozen=True)
class Saved:
    """What a manifest tells of the checkpoint that is to be begun with."""

    step: int
    shapes: Mapping[str, tuple[int, ...]]
    """Of the model's parameters, by their own names."""
    training: Mapping[str, Any] | None
    """The training spec it was made by, if it is known."""


def reference(text: str) -> JobReference | FolderReference:
    """What `init_from.from` names. Raises ValueError."""
    if text.startswith(STOCK_URI):
        return FolderReference(text.removeprefix(STOCK_URI), stock=True)
    if text.startswith("/") or "://" in text:
        return FolderReference(text, stock=False)
    try:
        return job_reference(text)
    except ValueError:
        raise ValueError(
            f"{text!r} is neither JOB, JOB/STEP nor the URI of a checkpoint's folder"
        ) from None


def job_reference(text: str) -> JobReference:
    """What JOB or JOB/STEP names. Raises ValueError."""
    job, slash, step = text.partition("/")
    if not slash:
        return JobReference(job, None)
    if not (job and step.isascii() and step.isdigit() and len(step) < 16):
        raise ValueError(f"{text!r} is neither JOB nor JOB/STEP")
    return JobReference(job, int(step))


def part_to_take(spec: JobSpec, saved: Saved) -> InitPart:
    """What the user says; else everything where recipe and model are the same, else the model."""
    assert spec.init_from is not None
    if spec.init_from.what is not None:
        return spec.init_from.what
    if saved.training is None:
        return InitPart.MODEL
    there = tuple(saved.training.get(key) for key in ("recipe", "function", "model"))
    same = there == (spec.recipe, spec.function, spec.model.model_dump(mode="json"))
    return InitPart.EVERYTHING if same else InitPart.MODEL


def misfits(spec: JobSpec, saved: Saved, part: InitPart) -> list[str]:
    """Why the job cannot begin with that part of it; empty if nothing speaks against it."""
    found = _shape_misfits(spec, saved)
    if part is InitPart.EVERYTHING:
        found += _run_misfits(spec, saved)
    return found


def _shape_misfits(spec: JobSpec, saved: Saved) -> list[str]:
    if spec.recipe != "pretrain" or spec.function is not None:
        return []  # only the recipe itself knows its parameters
    wanted = parameter_shapes(spec.model, BYTE_VOCABULARY)
    found = [
        f"{name} has the shape {tuple(saved.shapes[name])} there, {shape} here"
        for name, shape in wanted.items()
        if name in saved.shapes and tuple(saved.shapes[name]) != shape
    ]
    missing = [name for name in wanted if name not in saved.shapes]
    if missing:
        found.append(f"it has no {_listed(missing)}")
    unexpected = [name for name in saved.shapes if name not in wanted]
    if unexpected:
        found.append(f"this model has no {_listed(unexpected)}")
    return [*found[:_LISTED], *([f"and {len(found) - _LISTED} more"] if found[_LISTED:] else [])]


def _run_misfits(spec: JobSpec, saved: Saved) -> list[str]:
    """The data position goes on only where the same samples come in the same order."""
    found = []
    if saved.step >= spec.train.steps:
        found.append(f"it stands at step {saved.step}, train.steps is {spec.train.steps}")
    if saved.training is None:
        return found
    there = TrainingSpec.model_validate(saved.training)
    pairs = {
        "recipe": (there.recipe, spec.recipe),
        "function": (there.function, spec.function),
        "data.source": (there.data.source, spec.data.source),
        "model.sequence_length": (there.model.sequence_length, spec.model.sequence_length),
        "train.global_batch": (there.train.global_batch, spec.train.global_batch),
        "train.seed": (there.train.seed, spec.train.seed),
        "train.schedule": (there.train.schedule, spec.train.schedule),
    }
    found += [
        f"{name} is {_shown(theirs)} there, {_shown(ours)} here: make it the same, or say "
        "`what: model`"
        for name, (theirs, ours) in pairs.items()
        if theirs != ours
    ]
    return found


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if names[_LISTED:] else ""
    return ", ".join(names[:_LISTED]) + more


def _shown(value: Any) -> str:
    return str(value.model_dump()) if hasattr(value, "model_dump") else repr(value)
