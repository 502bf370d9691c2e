"""Boxes of global tensors: the arithmetic by which state moves between meshes. Pure.

A box is a block `[offset, offset + length)` in each dimension. Whatever mesh wrote the boxes of a
tensor and whatever mesh reads it, a reader needs the intersections of its box with theirs, and a
checkpoint is complete if its boxes tile the tensor: no gap, no overlap.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Box:
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def volume(self) -> int:
        """Number of elements; of a scalar, 1."""
        return math.prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """What both boxes cover, or None if that is nothing."""
        sides = zip(self.offsets, self.shape, other.offsets, other.shape, strict=True)
        offsets, shape = [], []
        for mine, my_length, theirs, their_length in sides:
            start = max(mine, theirs)
            length = min(mine + my_length, theirs + their_length) - start
            if length <= 0:
                return None
            offsets.append(start)
            shape.append(length)
        return Box(tuple(offsets), tuple(shape))

    def minus(self, other: Box) -> list[Box]:
        """What of this box `other` does not cover, as boxes that do not overlap."""
        common = self.intersect(other)
        if common is None:
            return [self]
        left, offsets, shape = [], list(self.offsets), list(self.shape)
        for dim, (start, length) in enumerate(zip(common.offsets, common.shape, strict=True)):
            end, mine_end = start + length, offsets[dim] + shape[dim]
            for first, last in ((offsets[dim], start), (end, mine_end)):
                if last > first:
                    left.append(
                        Box(
                            (*offsets[:dim], first, *offsets[dim + 1 :]),
                            (*shape[:dim], last - first, *shape[dim + 1 :]),
                        )
                    )
            offsets[dim], shape[dim] = start, length
        return left

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Where this box lies in an array that holds `outer`."""
        return tuple(
            slice(mine - theirs, mine - theirs + length)
            for mine, theirs, length in zip(self.offsets, outer.offsets, self.shape, strict=True)
        )


def tiling_fault(boxes: Iterable[Box], global_shape: Sequence[int]) -> str | None:
    """Why `boxes` do not tile a tensor of `global_shape`, or None if they do."""
    whole = Box((0,) * len(global_shape), tuple(global_shape))
    filled = [box for box in boxes if box.volume]
    for box in filled:
        if box.intersect(whole) != box:
            return f"box {box.shape} at {box.offsets} exceeds the shape {whole.shape}"
    covered = sum(box.volume for box in filled)
    if covered < whole.volume:
        return f"{whole.volume - covered} of {whole.volume} elements are missing"
    overlapping = _overlap(filled)
    if overlapping is not None:
        first, second = overlapping
        return f"the boxes at {first.offsets} and {second.offsets} overlap"
    return None


def _overlap(boxes: list[Box]) -> tuple[Box, Box] | None:
    """Two boxes with an element in common, if there are any.

    Swept along the dimension that is cut most, where few boxes are open at a time.
    """
    if not boxes:
        return None
    dims = len(boxes[0].offsets)
    sweep = max(range(dims), key=lambda dim: len({b.offsets[dim] for b in boxes}), default=None)
    if sweep is None:
        return (boxes[0], boxes[1]) if len(boxes) > 1 else None
    active: list[Box] = []
    for box in sorted(boxes, key=lambda b: b.offsets[sweep]):
        start = box.offsets[sweep]
        active = [b for b in active if b.offsets[sweep] + b.shape[sweep] > start]
        for other in active:
            if box.intersect(other) is not None:
                return other, box
        active.append(box)
    return None
