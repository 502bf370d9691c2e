"""The learning rate as a pure function of the step, so there is no schedule state to save."""

from __future__ import annotations

import math
from typing import assert_never

from holdfast_workers.spec import Decay, ScheduleSpec, TrainSpec


def learning_rate(train: TrainSpec, step: int) -> float:
    """Learning rate of step number `step` (1 is the first).

    Linear warm-up over `warmup_steps` to the peak, then, down to `final_lr_fraction` of it at the
    last step: nothing (constant), half a cosine (Loshchilov and Hutter 2017, arXiv:1608.03983), a
    line, or the peak until a decay at the end (Hu et al. 2024, arXiv:2404.06395, section 4).
    """
    peak, schedule = peak_rate(train), train.schedule
    if step <= schedule.warmup_steps:
        return peak * step / schedule.warmup_steps
    if schedule.name == "constant":
        return peak
    floor = schedule.final_lr_fraction
    return peak * (floor + (1.0 - floor) * _height(schedule, train.last_step, step))


def peak_rate(train: TrainSpec) -> float:
    """The rate at the end of the warm-up: `lr`, for another batch than that of `lr_for_batch`
    scaled linearly (Goyal et al. 2017, arXiv:1706.02677, section 2.1)."""
    optimizer = train.optimizer
    if optimizer.lr_for_batch is None:
        return optimizer.lr
    return optimizer.lr * train.global_batch / optimizer.lr_for_batch


def _height(schedule: ScheduleSpec, last_step: int, step: int) -> float:
    """The rate's part of the way from its floor (0) to its peak (1), after the warm-up."""
    falling = last_step - schedule.warmup_steps
    if schedule.name == "wsd":
        falling = min(falling, schedule.decay_steps(last_step))
    span = max(1, falling)
    progress = min(1.0, max(0, step - (last_step - falling)) / span)
    match schedule.name:
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * progress))
        case "linear" | "constant":
            return 1.0 - progress
        case "wsd":
            assert schedule.decay is not None  # refused by `optimization_faults`
            return decayed(schedule.decay, progress)
        case _:
            assert_never(schedule.name)


def decayed(decay: Decay, progress: float) -> float:
    """The part that is left of a rate after a share `progress` (0 to 1) of its decay."""
    match decay:
        case "linear":
            return 1.0 - progress
        case "sqrt":
            return math.sqrt(1.0 - progress)
        case "1-sqrt":  # Hägele et al. 2024, arXiv:2405.18392, section 3
            return 1.0 - math.sqrt(progress)
        case _:
            assert_never(decay)
