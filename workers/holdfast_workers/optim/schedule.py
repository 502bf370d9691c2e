"""The learning rate as a pure function of the step, so there is no schedule state to save."""

from __future__ import annotations

import math

from holdfast_workers.spec import TrainSpec


def learning_rate(train: TrainSpec, step: int) -> float:
    """Learning rate of step number `step` (1 is the first).

    Linear warm-up over `warmup_steps`, then constant, or half a cosine down to
    `final_lr_fraction` of the peak at the last step (Loshchilov and Hutter 2017,
    arXiv:1608.03983).
    """
    peak, schedule = train.optimizer.lr, train.schedule
    if step <= schedule.warmup_steps:
        return peak * step / schedule.warmup_steps
    if schedule.name == "constant":
        return peak
    span = max(1, train.last_step - schedule.warmup_steps)
    progress = min(1.0, (step - schedule.warmup_steps) / span)
    floor = schedule.final_lr_fraction
    return peak * (floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress)))
