"""Each optimizer takes 20 steps like its reference: torch's own, or the formulas of its paper in
float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast_workers.optim.local_optimizer import NoPeers
from holdfast_workers.optim.new_optimizer import local_parameter, new_optimizer
from holdfast_workers.spec import OptimizerSpec

SHAPES = {"blocks.0.a": (12, 20), "blocks.0.b": (20, 12), "head.weight": (7, 5), "norm": (20,)}
RATE = 1e-2
Optimizer = Callable[[list[Tensor]], torch.optim.Optimizer]


def first_values() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) for shape in SHAPES.values()]


def gradients() -> Iterator[list[Tensor]]:
    generator = torch.Generator().manual_seed(2)
    for _ in range(20):
        yield [0.1 * torch.randn(shape, generator=generator) for shape in SHAPES.values()]


def trained(**fields: Any) -> list[Tensor]:
    spec = OptimizerSpec.model_validate(fields)
    tensors = first_values()
    parameters = [
        local_parameter(name, tensor, shape, {}, spec, in_block=name.startswith("blocks."))
        for (name, shape), tensor in zip(SHAPES.items(), tensors, strict=True)
    ]
    optimizer = new_optimizer(parameters, spec, NoPeers())
    for step in gradients():
        optimizer.step(step, RATE)
    return tensors


def of_torch(make: Optimizer) -> list[Tensor]:
    tensors = first_values()
    optimizer = make(tensors)
    for step in gradients():
        for tensor, gradient in zip(tensors, step, strict=True):
            tensor.grad = gradient
        optimizer.step()
    return tensors


def groups(tensors: list[Tensor], decay: float) -> list[dict[str, Any]]:
    """Decay of matrices only."""
    return [
        {"params": [each for each in tensors if each.ndim > 1], "weight_decay": decay},
        {"params": [each for each in tensors if each.ndim == 1], "weight_decay": 0.0},
    ]


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    for first, one, other in zip(first_values(), found, expected, strict=True):
        assert not torch.allclose(one, first, atol=1e-3)
        assert torch.allclose(one, other.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_sgd_is_that_of_torch(momentum: float, nesterov: bool) -> None:
    found = trained(name="sgd", weight_decay=0.2, momentum=momentum, nesterov=nesterov)
    assert_close(
        found,
        of_torch(
            lambda tensors: torch.optim.SGD(
                groups(tensors, 0.2), RATE, momentum, nesterov=nesterov, foreach=False
            )
        ),
    )


def test_adamw_is_that_of_torch() -> None:
    expected = of_torch(
        lambda tensors: torch.optim.AdamW(groups(tensors, 0.2), RATE, (0.9, 0.95), foreach=False)
    )
    assert_close(trained(weight_decay=0.2), expected)


def test_adafactor_is_that_of_torch() -> None:
    expected = of_torch(
        lambda tensors: torch.optim.Adafactor(groups(tensors, 0.2), RATE, foreach=False)
    )
    assert_close(trained(name="adafactor", weight_decay=0.2), expected)


def test_muon_is_that_of_torch_in_blocks_and_adamw_elsewhere() -> None:
    found = trained(name="muon", weight_decay=0.2)

    class Both(torch.optim.Optimizer):
        def __init__(self, tensors: list[Tensor]) -> None:
            super().__init__(tensors, {})
            self.parts = (
                torch.optim.Muon(
                    tensors[:2], RATE, weight_decay=0.2, adjust_lr_fn="match_rms_adamw"
                ),
                torch.optim.AdamW(groups(tensors[2:], 0.2), RATE, (0.9, 0.95), foreach=False),
            )

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for part in self.parts:
                part.step()  # type: ignore[no-untyped-call]

    expected = of_torch(Both)
    assert all(map(torch.equal, found[:2], expected[:2]))
    assert_close(found, expected)


def test_lion_follows_its_paper() -> None:
    tensors = [each.double() for each in first_values()]
    averages = [torch.zeros_like(each) for each in tensors]
    for step in gradients():
        for x, m, g in zip(tensors, averages, map(Tensor.double, step), strict=True):
            decay = 0.2 if x.ndim > 1 else 0.0
            x.sub_(RATE * (torch.sign(0.9 * m + 0.1 * g) + decay * x))
            m.copy_(0.99 * m + 0.01 * g)
    assert_close(trained(name="lion", weight_decay=0.2), tensors)


@pytest.mark.parametrize("nesterov", [False, True])
def test_lars_follows_its_paper(nesterov: bool) -> None:
    tensors = [each.double() for each in first_values()]
    buffers = [torch.zeros_like(each) for each in tensors]
    for step in gradients():
        for x, v, g in zip(tensors, buffers, map(Tensor.double, step), strict=True):
            if x.ndim > 1:
                trust = 1e-3 * x.norm() / (g.norm() + 0.2 * x.norm())
                g.add_(0.2 * x).mul_(trust)
            v.copy_(0.9 * v + g)
            x.sub_(50 * RATE * (g + 0.9 * v if nesterov else v))
    spec = {"name": "lars", "weight_decay": 0.2, "nesterov": nesterov}
    assert_close(trained(**spec, groups=[{"match": "*", "lr_scale": 50}]), tensors)


def test_lamb_follows_its_paper() -> None:
    tensors = [each.double() for each in first_values()]
    moments = [(torch.zeros_like(each), torch.zeros_like(each)) for each in tensors]
    for number, step in enumerate(gradients(), start=1):
        for x, (m, v), g in zip(tensors, moments, map(Tensor.double, step), strict=True):
            m.copy_(0.9 * m + 0.1 * g)
            v.copy_(0.999 * v + 0.001 * g * g)
            r = (m / (1 - 0.9**number)) / ((v / (1 - 0.999**number)).sqrt() + 1e-6)
            if x.ndim > 1:
                r = r + 0.2 * x
                r = r * x.norm() / r.norm()
            x.sub_(RATE * r)
    assert_close(trained(name="lamb", weight_decay=0.2), tensors)


def test_the_first_group_that_matches_gives_decay_and_rate() -> None:
    whole = trained(name="sgd", weight_decay=0.2)
    own = trained(
        name="sgd",
        weight_decay=0.2,
        groups=[
            {"match": "blocks.*.b", "lr_scale": 0.0},
            {"match": "blocks.*", "weight_decay": 0.0, "lr_scale": 0.5},
            {"match": "norm", "weight_decay": 0.2},
        ],
    )
    plain = of_torch(lambda tensors: torch.optim.SGD(tensors, RATE / 2, 0.9, foreach=False))
    decayed = of_torch(
        lambda tensors: torch.optim.SGD(tensors, RATE, 0.9, weight_decay=0.2, foreach=False)
    )
    assert torch.allclose(own[0], plain[0], rtol=1e-5, atol=1e-6)
    assert torch.equal(own[1], first_values()[1])
    assert torch.equal(own[2], whole[2])
    assert torch.allclose(own[3], decayed[3], rtol=1e-5, atol=1e-6)
