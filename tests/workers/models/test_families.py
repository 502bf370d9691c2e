"""The built-in Llama computes what transformers does, for every published family."""

from __future__ import annotations

import pytest
import torch
from tests.support.ranks.published_families import CASES, LENGTH, built, published


@pytest.mark.parametrize("name", CASES)
def test_its_logits_are_those_of_transformers(name: str) -> None:
    found = published(name)
    tokens = torch.randint(300, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits, expected = built(found)(tokens), found.theirs(tokens).logits
    assert 0.3 < expected.std() < 10
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
