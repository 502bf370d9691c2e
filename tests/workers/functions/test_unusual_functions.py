"""Habits of users' functions train as in torch and keep their bits, or are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.ranks import function_programs as programs
from tests.support.ranks.rank_worlds import RecordingHooks, Worlds
from torch import nn

from holdfast_workers.functions import FunctionError
from holdfast_workers.functions.registry import Registry
from holdfast_workers.functions.state_trial import try_object
from holdfast_workers.spec import TrainingSpec
from holdfast_workers.training.step_seeds import seed_generators

STEPS = 6


def spec(name: str, mesh: dict[str, int], **config: Any) -> TrainingSpec:
    return TrainingSpec.model_validate(
        {
            "function": f"tests.support.ranks.unusual_functions:{name}",
            "train": {"steps": STEPS, "global_batch": 12, "micro_batch": 2, "seed": 5},
            "parallel": mesh,
            "config": config,
        }
    )


def alone(name: str, **config: Any) -> RecordingHooks:
    hooks = RecordingHooks()
    hooks.on_checkpoint = lambda step, recipe: recipe.freeze(step)
    return programs.trained_alone(spec(name, {}, **config), hooks)


@pytest.mark.parametrize("name", ["counts_steps_in_a_hook", "whole_numbers"])
def test_trains(name: str) -> None:
    assert len(alone(name).rows) == STEPS


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("optimizes", {"optimizer": "sgd"}, "has created 'momentum_buffer' of model.0.weight"),
        ("optimizes", {"optimizer": "all"}, "keeps state under 'all'"),
        ("optimizes", {"optimizer": "count"}, "counts in its attribute 'count'"),
        ("changes_its_parts", {"how": "assigns"}, "average.0.weight was replaced"),
        ("changes_its_parts", {"how": "appends"}, r"average.3.\w+ was created after"),
        ("changes_its_parts", {"how": "registers"}, "average.late was created after"),
        ("swaps_weights", {"since": 3}, "changed trained parameters within a step"),
    ],
)
def test_what_would_be_lost_by_a_fault_is_refused(
    name: str, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(FunctionError, match=message):
        alone(name, **config)


def test_weights_that_a_function_exchanges_within_its_steps_are_copied_before() -> None:
    assert len(alone("swaps_weights", since=1).rows) == STEPS
    net = nn.Linear(2, 2)
    registry = Registry({})
    registry.add("net", net)
    registry.add("optimizer", torch.optim.SGD(net.parameters(), 0.1))
    registry.collect()
    registry.fix_layout([])
    frozen, digest = registry.freeze({}), registry.digest({})
    with torch.no_grad():
        net.weight.add_(1.0)
    assert frozen.digest() == digest != registry.digest({})


@pytest.mark.seconds
def test_a_wrapped_model_has_the_bits_of_a_bare_one_whatever_the_wrapper_has_averaged(
    worlds: Worlds,
) -> None:
    mesh = {"dp_shard": 2}
    for name, bare, wrapped in (
        ("unfreezes", {"wrapped": False}, {"wrapped": True}),
        ("skips_the_last_micro_batch", {"divided": ""}, {"divided": "ddp"}),
    ):
        expected = worlds.run(programs.trained, spec(name, mesh, **bare))[0]["digests"]
        for rank in worlds.run(programs.trained, spec(name, mesh, **wrapped)):
            assert rank["digests"] == expected


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("skips_the_last_micro_batch", {"divided": "fsdp"}, "of its last micro-batch, in which"),
        ("default_mesh", {}, r"model.0.weight is divided over a device mesh .* ctx\.mesh"),
        ("wraps_beside", {}, "model.0.weight is wrapped in .*, and the wrapper is not registered"),
    ],
)
def test_a_divided_model_that_cannot_be_trained_is_refused(
    worlds: Worlds, name: str, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(AssertionError, match=f"FunctionError: .*{message}"):
        worlds.run(programs.trained, spec(name, {"dp_shard": 2}, **config))


class Kept:
    """Keeps the loaded dictionary itself, as `how` says."""

    def __init__(self, how: str) -> None:
        self.held: dict[str, Any] = {"turns": 1, "best": 0.5}
        self.how = how

    def state_dict(self) -> dict[str, Any]:
        return self.held

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.how == "insists":
            assert type(state) is dict
        self.held = state


@pytest.mark.parametrize("how", ["keeps", "insists"])
def test_an_object_may_keep_the_dictionary_that_it_is_given(how: str) -> None:
    part = Kept(how)
    try_object("part", part)
    assert part.held == {"turns": 1, "best": 0.5} and type(part.held) is dict


def test_all_generators_of_random_numbers_follow_from_the_step() -> None:
    import random

    import numpy as np

    def drawn(step: int) -> tuple[float, float, float]:
        seed_generators(7, step, 0, "cpu")
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    first, other = drawn(1), drawn(2)
    assert drawn(1) == first and not set(first) & set(other)
