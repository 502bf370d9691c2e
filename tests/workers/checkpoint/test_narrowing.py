"""Values are narrowed as torch does it, and those that were narrow before keep their bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from holdfast_workers.checkpoint.narrowing import narrowed_values

TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.mark.parametrize("dtype", TYPES)
def test_every_narrow_value_keeps_its_bits(dtype: str) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    narrow = torch.from_numpy(bits.view(np.int16)).view(TYPES[dtype])
    wide = narrow.float()
    if dtype == "float16":  # a signalling one becomes quiet wherever it is widened
        bits, wide = bits[~narrow.isnan().numpy()], wide[~narrow.isnan()]
    assert np.array_equal(narrowed_values(wide.numpy(), dtype), bits)


@pytest.mark.parametrize("dtype", TYPES)
def test_the_nearest_value_is_taken_and_of_two_the_even_one(dtype: str) -> None:
    random = np.random.default_rng(1)
    # Of all exponents that float16 has, and exact halves between two values.
    values = random.standard_normal(1 << 16) * 2.0 ** random.integers(-26, 13, 1 << 16)
    halves = np.arange(1, 1 << 12) / (1 << 12) + 1
    wide = np.concatenate((values, halves, -halves)).astype(np.float32)
    theirs = torch.from_numpy(wide).to(TYPES[dtype]).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(narrowed_values(wide, dtype), theirs)


@pytest.mark.parametrize(("dtype", "value"), [("bfloat16", 3.4e38), ("float16", 65520.0)])
def test_a_value_that_would_become_infinite_is_refused(dtype: str, value: float) -> None:
    infinite = np.array([np.inf, -np.inf, 65504.0], np.float32)
    assert narrowed_values(infinite, dtype).tolist()[0] in (0x7F80, 0x7C00)
    with pytest.raises(FloatingPointError):
        narrowed_values(np.array([1.0, value], np.float32), dtype)
