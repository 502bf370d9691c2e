"""The source of each position of a mixture: a pure function of the weights and the position.

A binary tree over the sources splits the positions in exact integers. A node with the weights a and
b of its sides gives its position p to the left if floor((p + 1)·a / (a + b)) is more than
floor(p·a / (a + b)), which then is the position there: a Beatty sequence. So in the first n
positions, a source's count differs from its share of n by less than the depth of the tree, and a
look-up costs that depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import gcd, lcm

import numpy as np

from holdfast_workers.data.sample_order import Indices

LARGEST_TOTAL = 1 << 20
"""The largest sum of the weights as integers: products with positions up to 2^42 fit in 64 bits."""


class Mixture:
    """Sources with weights. Weights whose ratios need integers with a sum above `LARGEST_TOTAL` are
    rounded to such a sum; no source gets less than 1."""

    def __init__(self, weights: Sequence[float]) -> None:
        """Raises ValueError if a weight is not above 0."""
        self.weights = _as_integers(weights)
        self._ends = np.cumsum([0, *self.weights]).tolist()

    @property
    def total(self) -> int:
        return sum(self.weights)

    @property
    def depth(self) -> int:
        return (len(self.weights) - 1).bit_length()

    def choose(self, positions: Indices) -> tuple[Indices, Indices]:
        """The source of each position, and the number of the source's positions before."""
        sources, indices = np.empty_like(positions), np.empty_like(positions)

        def descend(first: int, last: int, own: Indices, where: Indices) -> None:
            if last - first == 1 or not len(where):
                sources[where], indices[where] = first, own
                return
            middle, part, whole = self._split(first, last)
            before = own * part // whole
            left = (own + 1) * part // whole > before
            descend(first, middle, before[left], where[left])
            descend(middle, last, (own - before)[~left], where[~left])

        descend(0, len(self.weights), positions, np.arange(len(positions)))
        return sources, indices

    def counts(self, positions: int) -> list[int]:
        """How many of the first positions each source has."""

        def descend(first: int, last: int, own: int) -> list[int]:
            if last - first == 1:
                return [own]
            middle, part, whole = self._split(first, last)
            left = own * part // whole
            return descend(first, middle, left) + descend(middle, last, own - left)

        return descend(0, len(self.weights), positions)

    def position(self, source: int, index: int) -> int:
        """The position at which the source has so many positions before: the inverse of
        `choose`."""

        def ascend(first: int, last: int) -> int:
            if last - first == 1:
                return index
            middle, part, whole = self._split(first, last)
            if source < middle:
                return -((ascend(first, middle) + 1) * -whole // part) - 1
            return ascend(middle, last) * whole // (whole - part)

        return ascend(0, len(self.weights))

    def most_of(self, source: int, positions: int) -> int:
        """At least as many as the source has of any so many successive positions."""
        share = positions * self.weights[source] // self.total
        return min(positions, share + 2 * self.depth + 1)

    def _split(self, first: int, last: int) -> tuple[int, int, int]:
        """The middle of a range of sources, the weight before it, and the weight of all."""
        middle, start = (first + last) // 2, self._ends[first]
        return middle, self._ends[middle] - start, self._ends[last] - start


def _as_integers(weights: Sequence[float]) -> tuple[int, ...]:
    if not weights or not all(weight > 0 for weight in weights):
        raise ValueError(f"weights must be above 0: {list(weights)}")
    exact = [Fraction(repr(float(weight))) for weight in weights]  # 0.1 is a tenth
    scale = lcm(*(each.denominator for each in exact))
    integers = [int(each * scale) for each in exact]
    if sum(integers) // gcd(*integers) > LARGEST_TOTAL:
        room = LARGEST_TOTAL - len(integers)
        whole = sum(integers)
        integers = [max(1, each * room // whole) for each in integers]
    common = gcd(*integers)
    return tuple(each // common for each in integers)
