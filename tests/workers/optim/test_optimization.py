"""The optimizer, the schedule and the clipping follow their papers."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from holdfast_workers.optim.adamw import LocalAdamW, clip, squared_norm
from holdfast_workers.optim.schedule import learning_rate
from holdfast_workers.spec import OptimizerSpec, TrainSpec


def test_adamw_follows_the_formula_and_decays_matrices_only() -> None:
    spec = OptimizerSpec(lr=0.1, weight_decay=0.5, betas=(0.9, 0.99), eps=1e-8)
    matrix, vector = torch.tensor([[2.0]]), torch.tensor([2.0])
    optimizer = LocalAdamW([matrix, vector], [True, False], spec)
    m = v = 0.0
    x = {"matrix": 2.0, "vector": 2.0}
    for step in range(1, 4):
        gradient = 0.3 * step
        optimizer.step([torch.tensor([[gradient]]), torch.tensor([gradient])], 0.1)
        m, v = 0.9 * m + 0.1 * gradient, 0.99 * v + 0.01 * gradient**2
        update = (m / (1 - 0.9**step)) / (math.sqrt(v / (1 - 0.99**step)) + 1e-8)
        x["matrix"] = x["matrix"] * (1 - 0.1 * 0.5) - 0.1 * update
        x["vector"] -= 0.1 * update
    assert matrix.item() == pytest.approx(x["matrix"], rel=1e-5)
    assert vector.item() == pytest.approx(x["vector"], rel=1e-5)


def test_a_restored_optimizer_continues_identically() -> None:
    def make() -> tuple[torch.Tensor, LocalAdamW]:
        tensor = torch.linspace(-1, 1, 33)
        return tensor, LocalAdamW([tensor], [True], OptimizerSpec())

    gradients = [torch.randn(33, generator=torch.Generator().manual_seed(s)) for s in range(6)]
    whole, optimizer = make()
    for gradient in gradients:
        optimizer.step([gradient], 1e-2)
    first, optimizer = make()
    for gradient in gradients[:3]:
        optimizer.step([gradient], 1e-2)
    second, fresh = make()
    second.copy_(first)
    fresh.exp_avg[0].copy_(optimizer.exp_avg[0])
    fresh.exp_avg_sq[0].copy_(optimizer.exp_avg_sq[0])
    fresh.set_steps_taken(3)
    for gradient in gradients[3:]:
        fresh.step([gradient], 1e-2)
    assert torch.equal(whole, second)


def test_an_empty_shard_is_supported() -> None:
    tensors = [torch.empty(0, 4), torch.ones(2)]
    optimizer = LocalAdamW(tensors, [True, False], OptimizerSpec())
    optimizer.step([torch.empty(0, 4), torch.ones(2)], 1e-2)
    assert squared_norm([torch.empty(0, 4), torch.full((2,), 3.0)]) == pytest.approx(18.0)
    assert squared_norm([]) == 0.0


def test_clipping_bounds_the_global_norm_and_keeps_smaller_gradients() -> None:
    gradients = [torch.full((3,), 2.0), torch.full((2, 2), 1.0)]
    norm = math.sqrt(squared_norm(gradients))
    clip(gradients, norm, 100.0)
    assert torch.equal(gradients[0], torch.full((3,), 2.0))
    clip(gradients, norm, None)
    assert torch.equal(gradients[0], torch.full((3,), 2.0))
    clip(gradients, norm, 1.0)
    assert math.sqrt(squared_norm(gradients)) == pytest.approx(1.0)


def test_the_rate_warms_up_peaks_and_falls_to_its_floor() -> None:
    train = TrainSpec.model_validate(
        {
            "steps": 100,
            "optimizer": {"lr": 1.0},
            "schedule": {"warmup_steps": 10, "final_lr_fraction": 0.1},
        }
    )
    rates = [learning_rate(train, step) for step in range(1, 101)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == 1.0 == max(rates)
    assert rates[54] == pytest.approx(0.55)
    assert rates[99] == pytest.approx(0.1)
    assert all(a > b for a, b in pairwise(rates[9:]))


def test_a_constant_rate_stays() -> None:
    train = TrainSpec.model_validate(
        {"steps": 5, "optimizer": {"lr": 2.0}, "schedule": {"name": "constant", "warmup_steps": 0}}
    )
    assert [learning_rate(train, step) for step in (1, 3, 5)] == [2.0] * 3
