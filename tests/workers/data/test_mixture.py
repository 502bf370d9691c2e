"""The sources of a mixture come in the ratio of their weights, at every position."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_workers.data.mixture import LARGEST_TOTAL, Mixture

WEIGHTS = st.lists(
    st.one_of(
        st.integers(1, 9).map(float),
        st.floats(min_value=1e-9, max_value=1e6, exclude_min=True),
    ),
    min_size=1,
    max_size=64,
)


@given(weights=WEIGHTS, start=st.one_of(st.just(0), st.integers(0, 2**40)))
def test_in_every_prefix_each_source_has_its_share(weights: list[float], start: int) -> None:
    mixture = Mixture(weights)
    positions = np.arange(start, start + 300)
    sources, indices = mixture.choose(positions)
    counts = np.array(mixture.counts(start))
    for position, source, index in zip(
        positions.tolist(), sources.tolist(), indices.tolist(), strict=True
    ):
        assert index == counts[source], position
        counts[source] += 1
        for count, weight in zip(counts.tolist(), mixture.weights, strict=True):
            # |count - n · w| < depth, in exact integers
            away = abs(count * mixture.total - (position + 1) * weight)
            assert away < max(1, mixture.depth) * mixture.total
    assert counts.tolist() == mixture.counts(start + 300)


@given(weights=WEIGHTS)
def test_weights_become_integers_that_are_near_them(weights: list[float]) -> None:
    mixture = Mixture(weights)
    assert mixture.total <= LARGEST_TOTAL
    assert min(mixture.weights) >= 1
    for exact, weight in zip(weights, mixture.weights, strict=True):
        near = exact / sum(weights)
        assert weight / mixture.total == pytest.approx(near, abs=2 * len(weights) / LARGEST_TOTAL)


def test_simple_ratios_are_exact() -> None:
    assert Mixture([0.7, 0.3]).weights == (7, 3)
    assert Mixture([0.1, 0.2, 1]).weights == (1, 2, 10)
    assert Mixture([1e6, 1e6]).weights == (1, 1)
    assert Mixture([3]).weights == (1,)


@pytest.mark.parametrize("weights", [[], [1.0, 0.0], [-1.0], [float("nan")]])
def test_weights_that_are_none_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="above 0"):
        Mixture(weights)
