"""The faults of the section `evaluate`, and of what chooses checkpoints by its results. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from holdfast_workers.spec.evaluate import EvaluateSpec, EvaluationMetric
from holdfast_workers.spec.spec_fault import SpecFault
from holdfast_workers.spec.training import BUILT_IN_RECIPES, TrainingSpec

_EVERY, _VALIDATION = "evaluate.every_steps", "data.validation"


def evaluation_faults(spec: TrainingSpec) -> Iterator[SpecFault]:
    """Every fault of a recipe's evaluation; a function evaluates in its own loop."""
    evaluate = spec.evaluate
    if not evaluate.every_steps:
        for name in ("batches", "weights", "function", "stop"):
            if getattr(evaluate, name) != getattr(EvaluateSpec(), name):
                message = f"no step is evaluated: set every_steps, or remove {name}"
                yield SpecFault(path=f"evaluate.{name}", message=message, beside=(_EVERY,))
    elif spec.recipe not in BUILT_IN_RECIPES:
        message = "a recipe of your own is not evaluated: set every_steps to 0"
        yield SpecFault(path=_EVERY, message=message, beside=("recipe",))
    elif spec.model.family == "vit":
        message = "images are not evaluated: set every_steps to 0"
        yield SpecFault(path=_EVERY, message=message, beside=("model.family",))
    elif spec.data.validation is None:
        message = (
            "it reads the documents of `data.validation`, and there are none: name files there, "
            "or a `share` of `data.sources`; or set every_steps to 0"
        )
        yield SpecFault(path=_EVERY, message=message, beside=(_VALIDATION,))
    elif evaluate.weights == "average" and spec.train.ema is None:
        message = "the job has no moving average: set train.ema, or remove weights"
        yield SpecFault(path="evaluate.weights", message=message, beside=("train.ema",))
    elif evaluate.function is not None and spec.parallel.vocabulary_parallel:
        message = "no rank has the whole outputs with vocabulary_parallel: remove one of the two"
        beside = ("parallel.vocabulary_parallel",)
        yield SpecFault(path="evaluate.function", message=message, beside=beside)
    yield from _faults_of_best(spec)


def _faults_of_best(spec: TrainingSpec) -> Iterator[SpecFault]:
    remote, every = spec.checkpoint.remote, spec.evaluate.every_steps
    best = remote.keep_best
    if best is None or best.metric not in get_args(EvaluationMetric):
        return
    if not every:
        own = spec.recipe not in BUILT_IN_RECIPES
        remedy = "" if own else "set evaluate.every_steps, or "
        message = f"no step has {best.metric}: {remedy}choose another metric"
        path = "checkpoint.remote.keep_best.metric"
        yield SpecFault(path=path, message=message, beside=(_EVERY,))
    elif remote.every_steps == "auto" or remote.every_steps % every:
        message = (
            f"keep_best chooses by {best.metric}, which only evaluated steps have: write a "
            f"multiple of evaluate.every_steps {every}"
        )
        path = "checkpoint.remote.every_steps"
        beside = (_EVERY, "checkpoint.remote.keep_best")
        yield SpecFault(path=path, message=message, beside=beside)
