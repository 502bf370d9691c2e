"""The order of meshes by expected throughput, and whether growing to one is worth its pause. Pure.

What was measured on this very job counts; only a mesh without a measurement is modelled. The model:
a step takes as long as its passes, which are the micro-batches of the rank with most of them,
divided by the ranks that share a layer, its positions or the layers. A pipeline has as many passes
more as it has stages before the last, in which its ranks wait (as with the schedule 1f1b). A
measured mesh of nearly the same size gives the scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast_service.placement.mesh_axes import (
    layer_parts,
    passes,
    pipeline_ranks,
    sequence_parts,
)
from holdfast_service.placement.world_shape import WorldShape

ALWAYS_GROW = -1.0
"""The least gain with which throughput is ignored: more ranks are preferred."""


@dataclass(frozen=True)
class Speed:
    """The throughput of a mesh."""

    value: float
    """Tokens per second; without any measurement, in proportion to it."""
    is_measured: bool = False
    is_scaled: bool = False
    """Modelled from the measured throughput of another mesh."""

    @property
    def basis(self) -> str:
        if self.is_measured:
            return f"measured {self.value:,.0f} tokens/s"
        if self.is_scaled:
            return f"modelled {self.value:,.0f} tokens/s, not measured"
        return "modelled, not measured"

    @property
    def is_known(self) -> bool:
        """Whether the value is in tokens per second."""
        return self.is_measured or self.is_scaled


@dataclass(frozen=True)
class GrowthVerdict:
    """Whether growing is worth its pause, and the reason with its numbers."""

    is_worth: bool
    reason: str


def modelled_speed(shape: WorldShape, micro_batches: int) -> float:
    """A number in proportion to the expected tokens per second, or without micro-batches (0) to the
    ranks."""
    if not micro_batches:
        return float(shape.world_size)
    stages = pipeline_ranks(shape.mesh)
    parts = layer_parts(shape.mesh) * sequence_parts(shape.mesh) * stages
    return parts / (passes(shape.mesh, micro_batches) + stages - 1)


def expected_speeds(
    shapes: Sequence[WorldShape], measured: Mapping[WorldShape, float], micro_batches: int
) -> dict[WorldShape, Speed]:
    """The throughput of each shape: measured, or modelled."""
    return {shape: _expected(shape, measured, micro_batches) for shape in shapes}


def ranked(
    shapes: Sequence[WorldShape],
    speeds: Mapping[WorldShape, Speed],
    present: WorldShape,
    min_gain: float,
) -> tuple[WorldShape, ...]:
    """`shapes`, the fastest first; of equally fast ones, the one that stands first in `shapes`.

    The mesh that the world has gives way only to one that is faster by `min_gain`.
    """
    if min_gain <= ALWAYS_GROW:
        return tuple(shapes)
    bonus = 1.0 + max(0.0, min_gain)

    def slowness(shape: WorldShape) -> float:
        return -speeds[shape].value * (bonus if shape == present else 1.0)

    return tuple(sorted(shapes, key=slowness))


def worth_growing(
    present: Speed,
    larger: Speed,
    *,
    min_gain: float,
    pause_s: float,
    remaining_tokens: float | None,
) -> GrowthVerdict:
    """Whether a world of speed `present` should become one of speed `larger`.

    `pause_s`: how long the world stands still for it. `remaining_tokens`: what is left to train;
    None: not known, and the pause is then not weighed.
    """
    if min_gain <= ALWAYS_GROW:
        return GrowthVerdict(True, "it grows whenever there is room")
    gain = larger.value / present.value - 1.0
    what = f"{gain:+.0%} expected ({larger.basis}; now {present.basis})"
    if gain < min_gain:
        return GrowthVerdict(False, f"{what}, {min_gain:.0%} needed")
    if remaining_tokens is None or not present.is_known:
        return GrowthVerdict(True, f"{what}; the remaining time is not measured")
    remaining_s = remaining_tokens / present.value
    saved_s = remaining_s - remaining_tokens / larger.value
    numbers = f"{what}; saves {saved_s:.0f} s of {remaining_s:.0f} s, a pause of {pause_s:.1f} s"
    return GrowthVerdict(saved_s > pause_s, numbers)


def _expected(shape: WorldShape, measured: Mapping[WorldShape, float], micro_batches: int) -> Speed:
    if shape in measured:
        return Speed(measured[shape], is_measured=True)
    model = modelled_speed(shape, micro_batches)
    if not measured:
        return Speed(model)
    nearest = min(measured, key=lambda known: (_distance(known, shape), known.axes))
    scale = measured[nearest] / modelled_speed(nearest, micro_batches)
    return Speed(model * scale, is_scaled=True)


def _distance(one: WorldShape, other: WorldShape) -> int:
    return abs(one.world_size - other.world_size)
