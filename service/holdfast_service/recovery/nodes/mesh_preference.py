"""The order in which the job's meshes are tried, and whether a larger one is worth its pause.

Throughput decides, as measured on this job or else modelled. It is ignored where the user decides:
by an order of a size, by a list of meshes, or by a `grow_min_gain` below 0.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast_service.placement.mesh_throughput import (
    GrowthVerdict,
    expected_speeds,
    ranked,
    worth_growing,
)
from holdfast_service.placement.world_shape import WorldShape
from holdfast_service.recovery.core_state.state import CoreState


def wanted_shapes(state: CoreState) -> Sequence[WorldShape]:
    """The meshes that the job may have now, best first. A new attempt takes the first with room:
    its pause is paid in any case."""
    allowed = state.growth.allowed(state.config.shapes)
    if len(allowed) < 2 or _is_decided_by_user(state):
        return allowed
    config, measured = state.config, state.speeds.tokens_per_s
    speeds = expected_speeds(allowed, measured, config.micro_batches)
    return ranked(allowed, speeds, state.worlds.shape, config.spec.recovery.grow_min_gain)


def why_chosen(state: CoreState, shape: WorldShape) -> str:
    """The throughput for which a new attempt takes `shape` and leaves its mesh; "" if that does not
    decide."""
    if shape == state.worlds.shape or len(state.config.shapes) < 2 or _is_decided_by_user(state):
        return ""
    config, measured = state.config, state.speeds.tokens_per_s
    return f": {expected_speeds([shape], measured, config.micro_batches)[shape].basis}"


def larger_worth_growing(state: CoreState) -> dict[WorldShape, GrowthVerdict]:
    """The meshes that a running world should grow to where they have room, best first."""
    allowed, present = state.growth.allowed(state.config.shapes), state.worlds.shape
    if present not in allowed:
        return {}
    live = len(state.roster.live())
    larger = [shape for shape in allowed[: allowed.index(present)] if shape.nodes <= live]
    if not larger or _is_decided_by_user(state):
        return {shape: GrowthVerdict(True, "") for shape in larger}
    config, measured = state.config, state.speeds.tokens_per_s
    speeds = expected_speeds([*larger, present], measured, config.micro_batches)
    tokens = state.speeds.tokens_per_step
    left = config.steps - state.progress.committed
    verdicts = {
        shape: worth_growing(
            speeds[present],
            speeds[shape],
            min_gain=config.spec.recovery.grow_min_gain,
            pause_s=state.speeds.pause_s,
            remaining_tokens=tokens * left if tokens is not None else None,
        )
        for shape in ranked(larger, speeds, present, config.spec.recovery.grow_min_gain)
    }
    return {shape: verdict for shape, verdict in verdicts.items() if verdict.is_worth}


def _is_decided_by_user(state: CoreState) -> bool:
    growth, config = state.growth, state.config
    is_ordered = growth.limit is not None or growth.ordered is not None
    return is_ordered or config.meshes_are_listed or config.spec.recovery.grow_min_gain < 0
