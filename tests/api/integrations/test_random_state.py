"""The state of the default random number generators is captured, stored and put back."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.integrations import random_state

DRAWS: dict[str, Callable[[], Any]] = {
    "python": random.random,
    "gauss": lambda: random.gauss(0, 1),
    "numpy": np.random.random,
    "normal": np.random.standard_normal,
    "torch": lambda: torch.rand(3).tolist(),
}


@pytest.fixture(autouse=True)
def _keep_generators() -> Iterator[None]:
    before = random_state.capture()
    yield
    random_state.put_back(before)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(sorted(DRAWS)), max_size=8))
def test_the_same_numbers_follow_from_a_state_that_was_stored(names: list[str]) -> None:
    for name in names:
        DRAWS[name]()
    file = io.BytesIO()
    torch.save(random_state.capture(), file)
    expected = [draw() for draw in DRAWS.values()]
    file.seek(0)
    random_state.put_back(torch.load(file, weights_only=True))
    assert [draw() for draw in DRAWS.values()] == expected


def test_a_generator_that_the_state_lacks_stays_as_it_is() -> None:
    random.seed(1)
    expected = random.Random(1).random()
    random_state.put_back({"torch": torch.get_rng_state()})
    assert random.random() == expected
