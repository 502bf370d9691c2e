"""The sections of optimizer and schedule: defaults by name, and no field that is ignored."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from holdfast_workers.spec import (
    OptimizerName,
    OptimizerSpec,
    ScheduleSpec,
    TrainingSpec,
    find_faults,
)


def faults(train: dict[str, Any], **more: Any) -> dict[str, str]:
    spec = TrainingSpec.model_validate({"train": train, **more})
    return {fault.path: fault.message for fault in find_faults(spec)}


@pytest.mark.parametrize("name", get_args(OptimizerName))
def test_each_optimizer_has_defaults_that_are_no_fault_and_stay_in_its_document(
    name: OptimizerName,
) -> None:
    spec = OptimizerSpec(name=name, lr=1e-3)
    assert faults({"optimizer": {"name": name, "lr": 1e-3}}) == {}
    assert OptimizerSpec.model_validate(spec.model_dump(mode="json")) == spec
    assert faults({"optimizer": spec.model_dump(mode="json")}) == {}


@pytest.mark.parametrize("name", get_args(OptimizerName))
def test_no_optimizer_runs_with_the_learning_rate_of_another(name: OptimizerName) -> None:
    found = faults({"optimizer": {"name": name}})
    assert ("set lr" in found.get("train.optimizer.lr", "")) is (name not in ("adamw", "muon"))


def test_the_defaults_of_adamw_are_those_of_earlier_versions() -> None:
    spec = OptimizerSpec()
    assert (spec.name, spec.lr, spec.weight_decay) == ("adamw", 3e-4, 0.1)
    assert (spec.betas, spec.eps) == ((0.9, 0.95), 1e-8)
    # As in the states that they saved.
    assert ScheduleSpec().model_dump(exclude_none=True) == {
        "name": "cosine",
        "warmup_steps": 20,
        "final_lr_fraction": 0.1,
    }


@pytest.mark.parametrize(
    ("train", "path", "said"),
    [
        (
            {"optimizer": {"name": "sgd", "lr": 1.0, "eps": 1e-8}},
            "optimizer.eps",
            "sgd has no eps: remove it",
        ),
        ({"optimizer": {"momentum": 0.9}}, "optimizer.momentum", "adamw has no momentum"),
        ({"optimizer": {"betas": None}}, "optimizer.betas", "adamw needs betas"),
        (
            {"optimizer": {"name": "sgd", "lr": 1.0, "momentum": 0.0, "nesterov": True}},
            "optimizer.nesterov",
            "needs a momentum",
        ),
        ({"schedule": {"decay": "sqrt"}}, "schedule.decay", "the schedule cosine has no decay"),
        (
            {"schedule": {"name": "wsd", "decay_share": None}},
            "schedule.decay_share",
            "the schedule wsd needs decay_share",
        ),
        (
            {"steps": 100, "schedule": {"name": "wsd", "warmup_steps": 60, "decay_share": 0.5}},
            "schedule.decay_share",
            "warmup_steps 60 and a decay in 50 steps (decay_share 0.5) exceed steps 100",
        ),
    ],
)
def test_a_field_that_would_be_ignored_is_refused(
    train: dict[str, Any], path: str, said: str
) -> None:
    found = faults(train)
    assert list(found) == [f"train.{path}"]
    assert said in found[f"train.{path}"]


@pytest.mark.parametrize(
    "section",
    [
        {"weight_decay": math.inf},
        {"eps": math.inf},
        {"groups": [{"match": "*", "weight_decay": math.inf}]},
        {"groups": [{"match": ""}]},
        {"groups": [{"match": "*" * 201}]},
    ],
    ids=str,
)
def test_a_value_that_no_document_can_keep_is_refused(section: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        OptimizerSpec.model_validate(section)


def test_a_function_averages_its_weights_itself() -> None:
    assert "train.ema" in faults({"ema": 0.9}, function="a.b:c")
