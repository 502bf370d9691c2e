"""AdamW and the clipping follow their papers; a restored optimizer continues with the same bits."""

from __future__ import annotations

import math

import pytest
import torch

from holdfast_workers.optim.gradients import clip, squared_norm
from holdfast_workers.optim.local_optimizer import LocalOptimizer, NoPeers
from holdfast_workers.optim.new_optimizer import local_parameter, new_optimizer
from holdfast_workers.spec import OptimizerSpec


def alone(
    spec: OptimizerSpec, *tensors: torch.Tensor, names: tuple[str, ...] = ("blocks.0.a", "b", "c")
) -> LocalOptimizer:
    """The optimizer of whole parameters."""
    parameters = [
        local_parameter(
            name, tensor, tuple(tensor.shape), {}, spec, in_block=name.startswith("blocks.")
        )
        for name, tensor in zip(names, tensors, strict=False)
    ]
    return new_optimizer(parameters, spec, NoPeers())


def test_adamw_follows_the_formula_and_decays_matrices_only() -> None:
    spec = OptimizerSpec(lr=0.1, weight_decay=0.5, betas=(0.9, 0.99), eps=1e-8)
    matrix, vector = torch.tensor([[2.0]]), torch.tensor([2.0])
    optimizer = alone(spec, matrix, vector)
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


NAMES = ("adamw", "sgd", "adafactor", "lion", "muon", "lars", "lamb")


@pytest.mark.parametrize("name", NAMES)
def test_a_restored_optimizer_continues_identically(name: str) -> None:
    def make() -> tuple[list[torch.Tensor], LocalOptimizer]:
        tensors = [torch.linspace(-1, 1, 33).view(11, 3), torch.linspace(0, 1, 5)]
        return tensors, alone(OptimizerSpec.model_validate({"name": name}), *tensors)

    def gradients(step: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(step)
        return [torch.randn(shape, generator=generator) for shape in ((11, 3), (5,))]

    whole, optimizer = make()
    for step in range(6):
        optimizer.step(gradients(step), 1e-2)
    first, optimizer = make()
    for step in range(3):
        optimizer.step(gradients(step), 1e-2)
    second, fresh = make()
    pairs = [(moment.tensor for moment in each.moments) for each in (fresh, optimizer)]
    for copy, original in [*zip(second, first, strict=True), *zip(*pairs, strict=True)]:
        copy.copy_(original)
    fresh.set_steps_taken(3)
    for step in range(3, 6):
        fresh.step(gradients(step), 1e-2)
    assert all(map(torch.equal, whole, second))


def test_an_empty_shard_is_supported() -> None:
    tensors = [torch.empty(0, 4), torch.ones(2)]
    optimizer = alone(OptimizerSpec(), *tensors)
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
