"""Boxes of global tensors: the arithmetic for moving state between meshes. Pure.

A box is a block `[offset, offset + length)` in each dimension. A reader needs the intersections of
its own box with the saved boxes, whatever meshes wrote and read the tensor. A checkpoint is
complete if its boxes tile every tensor: no gap, no overlap.
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
        """Number of elements; 1 for a scalar."""
        return math.prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """The box that both boxes cover, or None if they are disjoint."""
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
        """The part of this box that `other` does not cover, as disjoint boxes."""
        common = self.intersect(other)
        if common is None:
            return [self]
        remaining, offsets, shape = [], list(self.offsets), list(self.shape)
        for dim, (start, length) in enumerate(zip(common.offsets, common.shape, strict=True)):
            end, mine_end = start + length, offsets[dim] + shape[dim]
            for first, last in ((offsets[dim], start), (end, mine_end)):
                if last > first:
                    remaining.append(
                        Box(
                            (*offsets[:dim], first, *offsets[dim + 1 :]),
                            (*shape[:dim], last - first, *shape[dim + 1 :]),
                        )
                    )
            offsets[dim], shape[dim] = start, length
        return remaining

    def within(self, outer: Box) -> tuple[slice, ...]:
        """The place of this box in an array that holds `outer`."""
        return tuple(
            slice(mine - theirs, mine - theirs + length)
            for mine, theirs, length in zip(self.offsets, outer.offsets, self.shape, strict=True)
        )


def tiling_fault(boxes: Iterable[Box], global_shape: Sequence[int]) -> str | None:
    """The reason why `boxes` do not tile a tensor of `global_shape`, or None if they do."""
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
    """Two boxes with a common element, or None.

    Sweeps along the dimension with the most cuts, where few boxes are active at a time.
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
