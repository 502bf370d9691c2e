"""Samples are counted in batches of any shape."""

from __future__ import annotations

import pytest
import torch

from holdfast.integrations.batches import samples_of


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (torch.zeros(8, 3), 8),
        ([torch.zeros(4), torch.zeros(4, 2)], 4),
        ({"input_ids": torch.zeros(5, 2), "labels": torch.zeros(5)}, 5),
        (("name", {"x": torch.zeros(2, 2)}), 2),
        (torch.tensor(1.0), 1),
        ("text", 0),
        (None, 0),
        ([], 0),
    ],
)
def test_samples_are_the_length_of_the_first_tensor(batch: object, samples: int) -> None:
    assert samples_of(batch) == samples
