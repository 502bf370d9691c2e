"""Interprets `init_from`: the checkpoint it refers to, and whether a job can start from it. Pure.

A reference names a job (by id, or the newest with that name) and optionally a step, or a folder by
its URI. Whether the state fits is decided from its manifest, as far as the manifest describes it;
the workers check the rest when they load it, before the first step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from holdfast_service.job_model.job_reference import JobReference, parse_job_reference
from holdfast_service.job_model.job_spec import JobSpec
from holdfast_service.job_model.model_memory import shapes_of
from holdfast_workers.protocol.messages import DCP_URI_PREFIX, InitPart
from holdfast_workers.spec import OF_PUBLISHED, DataSpec, TrainingSpec, amount_text

_MAX_LISTED = 3


@dataclass(frozen=True)
class FolderReference:
    """A checkpoint's folder. `dcp`: the user says that torch.distributed.checkpoint wrote it."""

    uri: str
    dcp: bool


@dataclass(frozen=True)
class SavedCheckpoint:
    """The manifest's description of the checkpoint to start from."""

    step: int
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of the model's parameters, by name."""
    training: Mapping[str, Any] | None
    """The training spec that produced it, if it is known."""

    @property
    def readable_spec(self) -> TrainingSpec | None:
        """`training`, unless another version wrote it, which this one cannot read."""
        try:
            return None if self.training is None else TrainingSpec.model_validate(self.training)
        except ValidationError:
            return None


def parse_reference(text: str) -> JobReference | FolderReference:
    """The reference in `init_from.from`. Raises ValueError."""
    if text.startswith(DCP_URI_PREFIX):
        return FolderReference(text.removeprefix(DCP_URI_PREFIX), dcp=True)
    if text.startswith("/") or "://" in text:
        return FolderReference(text, dcp=False)
    try:
        return parse_job_reference(text)
    except ValueError:
        raise ValueError(
            f"{text!r} is not a JOB, a JOB/STEP or the URI of a checkpoint folder"
        ) from None


def part_to_load(spec: JobSpec, saved: SavedCheckpoint) -> InitPart:
    """The part that the user set. The default is everything if recipe and model are the same, else
    the model."""
    assert spec.init_from is not None
    if spec.init_from.what is not None:
        return spec.init_from.what
    before = saved.readable_spec
    if before is None:
        return InitPart.MODEL
    return InitPart.EVERYTHING if _is_same_training(before, spec) else InitPart.MODEL


def _is_same_training(before: TrainingSpec, spec: TrainingSpec) -> bool:
    """Whether the steps of both are computed in the same way. A published model that is not read
    yet is taken to be the one that its folder had; `mismatches` looks again once it is."""
    if (before.recipe, before.function_name) != (spec.recipe, spec.function_name):
        return False
    theirs, ours = before.model, spec.model
    if not ours.has_sizes and theirs.source != ours.source:
        return False
    # The first weights are the checkpoint's.
    ignored = {"source", "published", *(() if ours.has_sizes else OF_PUBLISHED)}
    return theirs.model_dump(exclude=ignored) == ours.model_dump(exclude=ignored)


def mismatches(spec: JobSpec, saved: SavedCheckpoint, part: InitPart) -> list[str]:
    """The reasons why the job cannot start from that part of the checkpoint; empty if it can."""
    found = _shape_mismatches(spec, saved)
    before, model = saved.readable_spec, spec.model
    asks = spec.init_from is not None and spec.init_from.what is None and not model.has_sizes
    if asks and before is not None and before.model.source != model.source:
        theirs = before.model.source or "no folder"
        found.append(
            f"model.from is {theirs} in the checkpoint, {model.source} in this spec, and whether "
            "they are the same model is not known yet: set `what: everything` or `what: model`"
        )
    if part is InitPart.EVERYTHING:
        found += _run_mismatches(spec, saved)
    return found


def _shape_mismatches(spec: JobSpec, saved: SavedCheckpoint) -> list[str]:
    if spec.recipe != "pretrain" or spec.has_own_model:
        return []  # the parameters are known only to the user's recipe
    if not spec.model.has_sizes or spec.model.family == "transformers":
        return []  # looked at again once they are known, or by the ranks
    ours, theirs = spec.vocabulary, _vocabulary(spec, saved)
    found = []
    if ours is not None and theirs not in (None, ours):
        whose = "tokenizer" if spec.model.vocabulary is None else "model"
        found = [
            f"the vocabulary has {theirs} tokens in the checkpoint, {ours} in this spec: use the "
            f"{whose} of the checkpoint"
        ]
    wanted = shapes_of(spec, theirs)
    found += [
        f"{name} has shape {tuple(saved.shapes[name])} in the checkpoint, {shape} in the model"
        for name, shape in wanted.items()
        if name in saved.shapes and tuple(saved.shapes[name]) != shape
    ]
    missing = [name for name in wanted if name not in saved.shapes]
    if missing:
        found.append(f"the checkpoint has no {_listed(missing)}")
    unexpected = [name for name in saved.shapes if name not in wanted]
    if unexpected:
        found.append(f"this model has no {_listed(unexpected)}")
    return [
        *found[:_MAX_LISTED],
        *([f"and {len(found) - _MAX_LISTED} more"] if found[_MAX_LISTED:] else []),
    ]


def _vocabulary(spec: JobSpec, saved: SavedCheckpoint) -> int | None:
    """Number of tokens that a language model has in the checkpoint; None: it has no embedding."""
    shapes = saved.shapes
    is_text = spec.model.family == "llama" and "embedding.positions" not in shapes
    return shapes["embedding.weight"][0] if is_text and shapes.get("embedding.weight") else None


def _run_mismatches(spec: JobSpec, saved: SavedCheckpoint) -> list[str]:
    """The data position can continue only if the same samples come in the same order."""
    found = []
    if spec.train.steps is not None and saved.step >= spec.train.steps:
        amount, steps = amount_text(spec.train), spec.train.steps
        only = f"train.{amount} comes to only {steps} steps"
        if not amount:
            only = f"train.steps is only {steps}"
        found.append(f"the checkpoint is at step {saved.step}, and {only}")
    before = saved.readable_spec
    if before is None:
        if saved.training is not None:
            found.append(
                "this version cannot read the spec in the checkpoint, which another one wrote, and "
                "does not know the order of its samples: set `what: model`"
            )
        return found
    pairs = {
        "recipe": (before.recipe, spec.recipe),
        "function": (before.function_name, spec.function_name),
        **_data_pairs(before.data, spec.data),
        "model.sequence_length": (before.model.sequence_length, spec.model.sequence_length),
        "train.global_batch": (before.train.global_batch, spec.train.global_batch),
        "train.seed": (before.train.seed, spec.train.seed),
        "train.schedule": (before.train.schedule, spec.train.schedule),
        "train.optimizer.name": (before.train.optimizer.name, spec.train.optimizer.name),
    }
    momenta = before.train.optimizer.momentum, spec.train.optimizer.momentum
    if spec.train.optimizer.name == "sgd" and 0 in momenta:  # its state has no buffer then
        pairs["train.optimizer.momentum"] = momenta
    averages = before.train.ema, spec.train.ema
    if None in averages:  # its decay may change, but it cannot begin or end
        pairs["train.ema"] = averages
    if before.model.published is not None and spec.model.published is not None:
        models = before.model, spec.model
        for name in OF_PUBLISHED:
            theirs, ours = (getattr(model, name) for model in models)
            pairs[f"model.{name}"] = theirs, ours
        theirs, ours = (model.published.config or {} for model in models if model.published)
        for key in [key for key in {**theirs, **ours} if theirs.get(key) != ours.get(key)][:1]:
            pairs[f"{key} of the model's config.json"] = theirs.get(key), ours.get(key)
    found += [
        f"{name} is {_shown(theirs)} in the checkpoint, {_shown(ours)} in this spec: make it the "
        "same, or set `what: model`"
        for name, (theirs, ours) in pairs.items()
        if theirs != ours
    ]
    return found


def _data_pairs(before: DataSpec, data: DataSpec) -> dict[str, tuple[object, object]]:
    """What the tokens and the order of the samples depend on, in the checkpoint and in the spec.
    Where the files of sources are says nothing about token sets whose digests are known."""
    pairs: dict[str, tuple[object, object]] = {
        "data.source": (before.source, data.source),
        "data.shuffle_gb": (before.shuffle_gb, data.shuffle_gb),
        "the number of data.sources": (len(before.sources), len(data.sources)),
    }
    sources = [*zip(before.sources, data.sources, strict=False)]
    if before.prepared and data.prepared:
        sets = enumerate(zip(before.prepared, data.prepared, strict=False))
        digests = {at: (theirs.digest, ours.digest) for at, (theirs, ours) in sets}
        pairs |= {f"the digest of the tokens of data.sources.{at}": digests[at] for at in digests}
        names: tuple[str, ...] = ("weight",)
    else:
        pairs["data.tokenizer"] = (before.tokenizer, data.tokenizer)
        pairs["data.document_end"] = (before.document_end, data.document_end)
        shares = before.held_out_share, data.held_out_share
        pairs["the share of data.validation"] = shares
        names = ("path", "text", "weight")
    for at, (theirs, ours) in enumerate(sources):
        for name in names:
            pairs[f"data.sources.{at}.{name}"] = (getattr(theirs, name), getattr(ours, name))
    return pairs


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_LISTED} more" if names[_MAX_LISTED:] else ""
    return ", ".join(names[:_MAX_LISTED]) + more


def _shown(value: Any) -> str:
    return str(value.model_dump()) if hasattr(value, "model_dump") else repr(value)
