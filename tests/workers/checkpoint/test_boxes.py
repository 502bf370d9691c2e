from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from holdfast_workers.checkpoint.boxes import Box, tiling_fault


@st.composite
def two_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box, Box]:
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=0, max_size=3)))

    def box() -> Box:
        offsets = tuple(draw(st.integers(0, side)) for side in shape)
        lengths = tuple(
            draw(st.integers(0, side - start)) for side, start in zip(shape, offsets, strict=True)
        )
        return Box(offsets, lengths)

    return shape, box(), box()


@st.composite
def grids(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape and a grid of boxes that covers it."""
    shape = tuple(draw(st.lists(st.integers(1, 8), min_size=0, max_size=3)))
    boxes = [Box((), ())]
    for side in shape:
        cuts = sorted({0, side, *draw(st.lists(st.integers(0, side), max_size=3))})
        pieces = [(start, end - start) for start, end in pairwise(cuts)]
        boxes = [
            Box((*box.offsets, start), (*box.shape, length))
            for box in boxes
            for start, length in pieces
        ]
    return shape, draw(st.permutations(boxes))


def _mask(shape: tuple[int, ...], box: Box) -> np.ndarray:
    mask = np.zeros(shape, dtype=bool)
    mask[box.within(Box((0,) * len(shape), shape))] = True
    return mask


@given(two_boxes())
def test_an_intersection_covers_the_common_elements(case: tuple[tuple[int, ...], Box, Box]) -> None:
    shape, box, other = case
    both = _mask(shape, box) & _mask(shape, other)
    common = box.intersect(other)
    assert (common.volume if common else 0) == both.sum()
    assert common == other.intersect(box)
    if common is not None:
        assert np.array_equal(_mask(shape, common), both)


@given(two_boxes())
def test_the_rest_of_a_box_consists_of_disjoint_boxes(
    case: tuple[tuple[int, ...], Box, Box],
) -> None:
    shape, box, other = case
    rest = sum((_mask(shape, part).astype(int) for part in box.minus(other)), np.zeros(shape, int))
    expected = _mask(shape, box) & ~_mask(shape, other)
    assert np.array_equal(rest, expected.astype(int))


@given(grids(), st.data())
def test_a_box_is_gathered_from_any_grid(
    case: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    shape, boxes = case
    whole = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    everything = Box((0,) * len(shape), shape)
    wanted = data.draw(st.sampled_from([*boxes, everything]))
    target = np.full(wanted.shape, -1)
    for box in boxes:
        common = wanted.intersect(box)
        if common is not None:
            target[common.within(wanted)] = whole[box.within(everything)][common.within(box)]
    assert np.array_equal(target, whole[wanted.within(everything)])


@given(grids(), st.data())
def test_a_grid_tiles_but_not_with_a_missing_or_duplicate_box(
    case: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    shape, boxes = case
    assert tiling_fault(boxes, shape) is None
    index = data.draw(st.integers(0, len(boxes) - 1))
    assert "missing" in str(tiling_fault(boxes[:index] + boxes[index + 1 :], shape))
    assert "overlap" in str(tiling_fault([*boxes, boxes[index]], shape))
    replaced = data.draw(st.integers(0, len(boxes) - 1))
    if replaced != index and boxes[replaced].shape == boxes[index].shape:
        same_volume = [*boxes]
        same_volume[replaced] = boxes[index]
        assert "overlap" in str(tiling_fault(same_volume, shape))


def test_a_box_beyond_the_shape_is_a_fault() -> None:
    assert "exceeds" in str(tiling_fault([Box((2,), (3,))], (4,)))
