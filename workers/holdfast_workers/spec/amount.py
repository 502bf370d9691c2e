"""How long a run is: `train.steps`, or what `train.tokens` or `train.epochs` come to. Pure.

A spec that has `tokens` or `epochs` gets its `steps` beside them as soon as they are known, which
for epochs is after the preparation of its sources; it is then valid as it is. Other steps beside
them are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from math import ceil

from holdfast_workers.spec.spec_fault import SpecFault
from holdfast_workers.spec.train import TrainSpec
from holdfast_workers.spec.training import BUILT_IN_RECIPES, TrainingSpec

AMOUNTS = ("train.steps", "train.tokens", "train.epochs")
_BESIDE = (
    *AMOUNTS,
    *("train.global_batch", "model.sequence_length", "model.family", "recipe", "data"),
)


def with_steps(spec: TrainingSpec) -> TrainSpec:
    """The section `train` with the steps that its tokens or epochs come to, if they are known."""
    steps = _steps_of(spec) if spec.train.steps is None else None
    return spec.train if steps is None else spec.train.model_copy(update={"steps": steps})


def amount_faults(spec: TrainingSpec) -> Iterator[SpecFault]:
    """Every fault of the three fields."""
    train = spec.train
    found = next(_faults_of_form(spec), None)
    if found is not None:
        yield found
        return
    steps, amount = _steps_of(spec), amount_text(train)
    if amount and train.steps is not None and train.steps != steps:
        comes_to = "" if steps is None else f", which comes to {steps:,} steps"
        message = f"steps {train.steps:,} is beside {amount}{comes_to}: remove one of them"
        yield SpecFault(path="train.steps", message=message, beside=_BESIDE)


def amount_text(train: TrainSpec) -> str:
    """The tokens or epochs of the section, such as `epochs 2`; "": it has steps alone."""
    if train.tokens is not None:
        return f"tokens {train.tokens:,}"
    return "" if train.epochs is None else f"epochs {train.epochs:g}"


def _faults_of_form(spec: TrainingSpec) -> Iterator[SpecFault]:
    """Why the length of the run cannot be known."""
    train = spec.train

    def fault(path: str, message: str) -> SpecFault:
        return SpecFault(path=path, message=message, beside=_BESIDE)

    if train.tokens is not None and train.epochs is not None:
        yield fault("train.epochs", "a job has either tokens or epochs: remove one of them")
    elif train.tokens is None and train.epochs is None:
        if train.steps is None:
            yield fault("train.steps", "it is null: write steps, tokens or epochs")
    elif why := _why_not_counted(spec):
        yield fault("train.tokens" if train.epochs is None else "train.epochs", why)
    elif train.epochs is not None:
        yield from _faults_of_epochs(spec)


def _why_not_counted(spec: TrainingSpec) -> str:
    """Why the tokens of a sample are not known; "" if they are."""
    if spec.function_name is not None:
        return "a function reads its own data, whose tokens are not known: set train.steps"
    if spec.recipe not in BUILT_IN_RECIPES:
        return "a recipe of your own makes its own samples, of unknown size: set train.steps"
    if spec.model.family == "vit":
        return "a model of the family vit reads images, not tokens: set train.steps"
    return ""


def _faults_of_epochs(spec: TrainingSpec) -> Iterator[SpecFault]:
    data, length = spec.data, spec.model.sequence_length
    path, message = "train.epochs", ""
    if not data.sources:
        message = (
            "epochs are counted in the prepared tokens of `data.sources`, and there are none: name "
            "the files there, or set train.tokens or train.steps"
        )
    elif any(source.weight is not None for source in data.sources):
        message = (
            "with weights, each source has epochs of its own: set train.tokens or train.steps, or "
            "remove the weights"
        )
    elif any((each.samples is None or each.sequence_length != length) for each in data.prepared):
        path, message = (
            "data.prepared",
            f"its samples were not counted for model.sequence_length {length}: remove `prepared`, "
            "and the server prepares the sources",
        )
    if message:
        yield SpecFault(path=path, message=message, beside=_BESIDE)


def _steps_of(spec: TrainingSpec) -> int | None:
    """The steps that the tokens or epochs come to; None: neither is given, or not known."""
    train, model = spec.train, spec.model
    if any(_faults_of_form(spec)):
        return None
    if train.tokens is not None:
        return -(-train.tokens // (train.global_batch * model.sequence_length))
    if train.epochs is None or not spec.data.prepared:
        return None
    samples = sum(each.samples or 0 for each in spec.data.prepared)
    # 0.1 is a tenth.
    return ceil(Fraction(repr(train.epochs)) * samples / train.global_batch)
