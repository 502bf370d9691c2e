"""Sums of gradients in buckets: their order, when they are started, and what stops them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from holdfast_workers.parallelize import replicate
from holdfast_workers.parallelize.mesh import fake_process_group
from holdfast_workers.parallelize.replicate import GradientSums, is_replicated_only
from holdfast_workers.spec import ModelSpec
from holdfast_workers.training.recipe import World

WORLD = World(0, 2, {"dp_replicate": 2}, 0, "cpu")


@pytest.fixture
def axis() -> Iterator[DeviceMesh]:
    with fake_process_group(WORLD):
        yield init_device_mesh("cpu", (2,), mesh_dim_names=("dp_replicate",))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the sums, in the order of their start; all their elements are doubled."""
    sizes: list[int] = []

    def double(tensor: Tensor, *, group: Any, async_op: bool) -> None:
        assert group.size() == 2 and async_op
        tensor.mul_(2)
        sizes.append(tensor.numel())

    monkeypatch.setattr(dist, "all_reduce", double)
    return sizes


class UsedInReverse(nn.Module):
    """`first` is used last, so its gradient arrives first; `spare` is unused."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 1, bias=False), nn.Linear(2, 3, bias=False)
        self.spare = nn.Linear(5, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.first(self.second(x))
        return result


def backward(model: nn.Module) -> None:
    torch.autograd.backward(model(torch.ones(4, 2)).sum())


def test_sums_start_in_the_order_of_the_buckets_although_gradients_arrive_in_another(
    axis: DeviceMesh, started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicate, "BUCKET_BYTES", 0)
    model = UsedInReverse()
    del model.spare
    sums = GradientSums(model, axis)
    sums.set_last_micro_batch(True)
    backward(model)
    assert started == [6, 3]
    sums.finish()


def test_only_the_last_micro_batch_is_summed_with_all_that_accumulated(
    axis: DeviceMesh, started: list[int]
) -> None:
    model = nn.Linear(2, 3)
    sums = GradientSums(model, axis)
    for last in (False, False, True):
        sums.set_last_micro_batch(last)
        assert started == []
        backward(model)
    sums.finish()
    assert started == [9]  # weight and bias together
    assert model.bias.grad is not None and model.bias.grad.tolist() == [2 * 3 * 4.0] * 3
    sums.set_last_micro_batch(False)
    backward(model)
    assert started == [9]


def test_a_parameter_without_a_gradient_is_an_error(axis: DeviceMesh, started: list[int]) -> None:
    model = UsedInReverse()
    sums = GradientSums(model, axis)
    sums.set_last_micro_batch(True)
    backward(model)
    with pytest.raises(RuntimeError, match="does not contribute to the loss"):
        sums.finish()


def test_an_interrupted_step_leaves_nothing(
    axis: DeviceMesh, started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicate, "BUCKET_BYTES", 0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    sums = GradientSums(model, axis)
    sums.set_last_micro_batch(True)
    backward(model[0])  # two of four buckets never fill
    sums.discard()
    for parameter in model.parameters():
        parameter.grad = None
    started.clear()
    sums.set_last_micro_batch(True)
    backward(model)
    sums.finish()
    assert sorted(started) == [1, 3, 3, 6]


def test_only_replicas_in_float32_are_not_left_to_fsdp() -> None:
    def applies(mesh: dict[str, int], dtype: str = "float32") -> bool:
        size = 1
        for ranks in mesh.values():
            size *= ranks
        spec = ModelSpec.model_validate({"dtype": dtype})
        return is_replicated_only(World(0, size, mesh, 0, "cpu"), spec)

    assert applies({"dp_replicate": 2, "dp_shard": 1, "tp": 1})
    assert not applies({"dp_replicate": 2, "dp_shard": 1, "tp": 1}, "bfloat16")
    assert not applies({"dp_replicate": 2, "dp_shard": 2, "tp": 1})
    assert not applies({"pp": 2, "dp_replicate": 2, "dp_shard": 1, "tp": 1})
    assert not applies({"dp_shard": 1, "tp": 1})
