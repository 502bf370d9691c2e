"""Before the first step, each registered object is saved and loaded on trial."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.workers.functions.test_registered_state import registry_of, saved
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    ExponentialLR,
    LRScheduler,
    ReduceLROnPlateau,
)

from holdfast_workers.functions import FunctionError


class Held:
    """An object as users write them; `load` and `save` are its methods' bodies."""

    def __init__(
        self,
        load: Callable[[dict[str, Any], dict[str, Any]], object] = dict.update,
        save: Callable[[dict[str, Any]], Any] = dict,
    ) -> None:
        self.content: dict[str, Any] = {"turns": 3, "seen": {1: [2.5]}, "best": None}
        self._load = load
        self._save = save

    def state_dict(self) -> Any:
        return self._save(self.content)

    def load_state_dict(self, state: Any) -> None:
        self._load(self.content, state)


def _by_keys(content: dict[str, Any], state: dict[str, Any]) -> None:
    for key in content:
        content[key] = state[key]


def _calls(content: dict[str, Any], state: dict[str, Any]) -> None:
    content.update(dict(**state))


@pytest.mark.parametrize(
    "load",
    [
        dict.update,
        _by_keys,
        _calls,
        lambda content, state: content.update({key: state.get(key) for key in content}),
        lambda content, state: content.update(copy.deepcopy(state)),
        lambda content, state: content.update(state.items()),
        lambda content, state: content.update({} | state),
        lambda content, state: [content.__setitem__(key, state.pop(key)) for key in list(state)],
    ],
)
def test_an_object_that_restores_its_state_passes_unchanged(load: Any) -> None:
    held = Held(load)
    before = copy.deepcopy(held.content)
    registry_of(held=held).try_state()
    assert held.content == before


def test_references_to_parts_of_a_state_stay_valid() -> None:
    held = Held()
    seen = held.content["seen"]
    registry_of(held=held).try_state()
    assert held.content["seen"] is seen


@pytest.mark.parametrize(
    ("held", "message"),
    [
        (
            Held(lambda content, state: content.update(turns=state["turns"], seen=state["seen"])),
            "^held cannot be restored: .* returns 'best', which its load_state_dict.. does not",
        ),
        (Held(lambda content, state: None), "'best', 'seen', 'turns', which its load"),
        (
            Held(lambda content, state: content.update(state, turns=0)),
            r"^held cannot be restored: .*held\.turns: 3, then 0",
        ),
        (
            Held(lambda content, state: content["seen"][1].extend(state["seen"][1])),
            r"held\.seen\.~dict\[0\]\[1\]: \[2\.5\], then \[2\.5, 2\.5\]",
        ),
        (
            Held(save=lambda content: {**content, "drawn": random.random()}),
            r"returns another value in each call .held\.drawn: ",
        ),
        (
            Held(lambda content, state: content.update(state["other"])),
            "refuses what its state_dict.. has returned .KeyError: 'other'",
        ),
        (Held(save=lambda content: [lambda: 0]), r"held\[0\] is a function"),
    ],
)
def test_an_object_that_does_not_restore_its_state_is_refused_by_name(
    held: Held, message: str
) -> None:
    with pytest.raises(FunctionError, match=message):
        registry_of(held=held).try_state()


def test_a_state_that_is_no_dictionary_is_tried_too() -> None:
    held = Held(save=lambda content: [*content.items()])
    registry_of(held=held).try_state()


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=5),
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5),
        torch.optim.lr_scheduler.ReduceLROnPlateau,
        lambda optimizer: torch.optim.lr_scheduler.CyclicLR(optimizer, 0.1, 0.2),
        lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3]),
        lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [
                torch.optim.lr_scheduler.LinearLR(optimizer),
                torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
            ],
            [2],
        ),
        lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [ChainedScheduler([ConstantLR(optimizer)]), ExponentialLR(optimizer, 0.9)],
            [2],
        ),
        lambda _: torch.amp.GradScaler("cpu"),
    ],
)
def test_torchs_own_objects_pass_and_are_restored(make: Any) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    schedule = make(optimizer)
    registry = registry_of(model=model, optimizer=optimizer, schedule=schedule)
    registry.try_state()
    before = saved(registry)
    registry.read(before)
    assert bytes(saved(registry)) == bytes(before)


class Training:
    """An object of a user that contains a scheduler, whose state it saves."""

    def __init__(self, schedule: LRScheduler) -> None:
        self.schedule = schedule

    def state_dict(self) -> dict[str, Any]:
        return {"schedule": self.schedule.state_dict(), "epoch": 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.schedule.load_state_dict({**state["schedule"]})
        assert state["epoch"] == 0


@pytest.mark.parametrize("of_registered", [True, False])
@pytest.mark.parametrize("kind", [ExponentialLR, ReduceLROnPlateau])
def test_a_scheduler_that_is_not_registered_is_refused(kind: Any, of_registered: bool) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    another = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), 0.1)
    argument = 0.9 if kind is ExponentialLR else "min"
    schedule = kind(optimizer if of_registered else another, argument)
    registry = registry_of(model=model, optimizer=optimizer)
    if of_registered:
        with pytest.raises(
            FunctionError, match=rf"optimizer has .* \({kind.__name__}\) that is not"
        ):
            registry.try_state()
    else:
        registry.try_state()
    assert schedule.last_epoch == 0
    registry_of(model=model, optimizer=optimizer, training=Training(schedule)).try_state()


class Unhashable(type):
    __hash__ = None  # type: ignore[assignment]


def test_a_scheduler_that_was_thrown_away_is_no_part_of_the_training() -> None:
    living = Unhashable("Living", (), {"__slots__": ("__weakref__", "content")})()
    living.content = [living]
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ExponentialLR(optimizer, 0.9)
    registry_of(model=model, optimizer=optimizer).try_state()


def test_the_trial_changes_no_tensor_and_no_random_number(
    capsys: pytest.CaptureFixture[str],
) -> None:

    def draw(content: dict[str, Any], state: dict[str, Any]) -> None:
        content.update(state)
        random.random(), np.random.rand(), torch.rand(1)

    registry = registry_of(held=Held(draw), part=torch.nn.BatchNorm1d(3))
    before = registry.digest({})
    draws = [torch.get_rng_state(), random.getstate(), str(np.random.get_state())]
    registry.try_state()
    after = [torch.get_rng_state(), random.getstate(), str(np.random.get_state())]
    assert torch.equal(draws[0], after[0]) and draws[1:] == after[1:]  # type: ignore[arg-type]
    assert registry.digest({}) == before
    assert capsys.readouterr().out == ""


def test_what_an_object_does_not_take_from_a_saved_state_is_in_the_log(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It may depend on the size of the world, so that is no error."""
    held = Held(lambda content, state: content.update(state, turns=min(state["turns"], 5)))
    registry = registry_of(held=held)
    registry.try_state()
    held.content["turns"] = 7
    registry.read(saved(registry))
    assert "WARNING held: after load_state_dict" in capsys.readouterr().out
    registry.read(saved(registry))
    assert capsys.readouterr().out == ""
