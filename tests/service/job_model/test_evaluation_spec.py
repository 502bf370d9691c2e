"""The section `evaluate` of a spec: each fault with the whole sentence."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast_service.errors import InvalidSpec
from holdfast_service.job_model.job_spec import parse

DATA = {"sources": [{"path": "/web/*.txt"}], "validation": {"share": 0.1}}


def faults(spec: dict[str, Any]) -> list[tuple[str, str]]:
    with pytest.raises(InvalidSpec) as refused:
        parse({"name": "a", **spec}, None)
    return [(fault["path"], fault["message"]) for fault in refused.value.faults]


def remote(metric: str, every: int | str) -> dict[str, Any]:
    return {"remote": {"every_steps": every, "keep_best": {"metric": metric}}}


@pytest.mark.parametrize(
    "spec",
    [
        {"data": DATA, "evaluate": {"every_steps": 10}},
        {"data": DATA, "evaluate": {"every_steps": 10, "batches": 4}},
        {"data": DATA, "evaluate": {"every_steps": 10, "stop": {"patience": 3}}},
        {
            "data": DATA,
            "evaluate": {"every_steps": 10, "weights": "average"},
            "train": {"ema": 0.99},
        },
        {"data": DATA, "evaluate": {"every_steps": 10, "function": "my.metrics:accuracy"}},
        {
            "data": DATA,
            "evaluate": {"every_steps": 10},
            "checkpoint": remote("eval_loss", 20),
        },
        {
            "data": DATA,
            "evaluate": {"every_steps": 10},
            "checkpoint": remote("eval_perplexity", 0),
        },
        {"function": "a:b", "checkpoint": remote("eval_loss", "auto")},
    ],
)
def test_what_is_accepted(spec: dict[str, Any]) -> None:
    parse({"name": "a", **spec}, None)


@pytest.mark.parametrize(
    ("spec", "path", "message"),
    [
        (
            {"evaluate": {"every_steps": 10}},
            "evaluate.every_steps",
            "it reads the documents of `data.validation`, and there are none: name files there, or "
            "a `share` of `data.sources`; or set every_steps to 0",
        ),
        (
            {
                "model": {"family": "vit", "image_size": 16, "patch_size": 4, "classes": 4},
                "data": {"source": "/i"},
                "evaluate": {"every_steps": 10},
            },
            "evaluate.every_steps",
            "images are not evaluated: set every_steps to 0",
        ),
        (
            {"recipe": "a:B", "checkpoint": remote("eval_loss", 20)},
            "checkpoint.remote.keep_best.metric",
            "no step has eval_loss: choose another metric",
        ),
        (
            {"data": DATA, "evaluate": {"batches": 4}},
            "evaluate.batches",
            "no step is evaluated: set every_steps, or remove batches",
        ),
        (
            {"data": DATA, "evaluate": {"weights": "average"}, "train": {"ema": 0.9}},
            "evaluate.weights",
            "no step is evaluated: set every_steps, or remove weights",
        ),
        (
            {"data": DATA, "evaluate": {"every_steps": 10, "weights": "average"}},
            "evaluate.weights",
            "the job has no moving average: set train.ema, or remove weights",
        ),
        (
            {"data": DATA, "evaluate": {"stop": {"patience": 3}}},
            "evaluate.stop",
            "no step is evaluated: set every_steps, or remove stop",
        ),
        (
            {"data": DATA, "evaluate": {"function": "a:b"}},
            "evaluate.function",
            "no step is evaluated: set every_steps, or remove function",
        ),
        (
            {"data": DATA, "evaluate": {"every_steps": 10, "function": "accuracy"}},
            "evaluate.function",
            "'accuracy' is not a function reference: write package.module:name",
        ),
        (
            {
                "data": DATA,
                "model": {"vocabulary": 256},
                "parallel": {"tp": 2, "vocabulary_parallel": True},
                "evaluate": {"every_steps": 10, "function": "a:b"},
            },
            "evaluate.function",
            "no rank has the whole outputs with vocabulary_parallel: remove one of the two",
        ),
        (
            {"data": DATA, "recipe": "a:B", "evaluate": {"every_steps": 10}},
            "evaluate.every_steps",
            "a recipe of your own is not evaluated: set every_steps to 0",
        ),
        (
            {"checkpoint": remote("eval_loss", 20)},
            "checkpoint.remote.keep_best.metric",
            "no step has eval_loss: set evaluate.every_steps, or choose another metric",
        ),
        (
            {
                "data": DATA,
                "evaluate": {"every_steps": 10},
                "checkpoint": remote("eval_loss", 25),
            },
            "checkpoint.remote.every_steps",
            "keep_best chooses by eval_loss, which only evaluated steps have: write a multiple of "
            "evaluate.every_steps 10",
        ),
        (
            {
                "data": DATA,
                "evaluate": {"every_steps": 10},
                "checkpoint": remote("eval_loss", "auto"),
            },
            "checkpoint.remote.every_steps",
            "keep_best chooses by eval_loss, which only evaluated steps have: write a multiple of "
            "evaluate.every_steps 10",
        ),
        (
            {"function": "a:b", "evaluate": {"every_steps": 10}},
            "evaluate",
            "a function evaluates in its own loop: remove it, and give the result to its step, as "
            "`metrics={'eval_loss': ...}`",
        ),
        (
            {"command": "train", "evaluate": {"every_steps": 10}},
            "evaluate",
            "a program evaluates in its own loop: remove it",
        ),
    ],
)
def test_what_is_refused(spec: dict[str, Any], path: str, message: str) -> None:
    assert faults(spec) == [(path, message)]
