"""What a function registers comes back as it was, or is refused by its name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.ranks import function_programs as programs
from tests.support.ranks.rank_worlds import Worlds
from torch import Tensor, nn

from holdfast_workers.functions import FunctionError
from holdfast_workers.functions.registry import Registry
from holdfast_workers.spec import TrainingSpec


def registry_of(**parts: Any) -> Registry:
    """With a small model and its optimizer, which every function has."""
    registry = Registry({"dp_shard": 0})
    if not any(isinstance(part, torch.optim.Optimizer) for part in parts.values()):
        net = nn.Linear(2, 2)
        parts = {"net": net, "optimizer": torch.optim.SGD(net.parameters(), 0.1), **parts}
    for name, part in parts.items():
        registry.add(name, part)
    registry.collect()
    registry.fix_layout([])
    return registry


def saved(registry: Registry) -> memoryview:
    payload = memoryview(bytearray(registry.layout.payload_bytes))
    registry.freeze({"step": 1}).write(payload)
    return payload


class WithBuffers(nn.Module):
    odd: Tensor

    def __init__(self, **buffers: Tensor) -> None:
        super().__init__()
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)


def _complex() -> Tensor:
    return torch.randn(4, dtype=torch.complex64)


_BUFFERS: dict[str, Callable[[], Tensor]] = {
    "expanded": lambda: torch.ones(1, 3).expand(4, 3),
    "channels_last": lambda: torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(2, 3).t(),
    "view": lambda: torch.randn(4, 6)[:, ::2],
    "conjugate": lambda: _complex().conj(),
    "negative": lambda: _complex().conj().imag,
    "complex": _complex,
    "empty": lambda: torch.empty(0, 3),
    "scalar": lambda: torch.tensor(2.5),
    **{
        name: partial(torch.arange(1, 6).to, getattr(torch, name))
        for name in ("uint16", "uint32", "uint64", "bool", "bfloat16", "float8_e4m3fn")
    },
}


@pytest.mark.parametrize("kind", _BUFFERS)
def test_a_buffer_of_any_form_is_saved_and_restored_in_place(kind: str) -> None:
    buffer = _BUFFERS[kind]()
    registry = registry_of(part=WithBuffers(buffer=buffer))
    registry.try_state()
    payload = saved(registry)
    before, strides = _values(buffer), buffer.stride()
    _clear(buffer)
    registry.read(payload)
    assert _values(buffer) == before
    assert buffer.stride() == strides


def _values(buffer: Tensor) -> str:
    return str(buffer.tolist())


def _clear(buffer: Tensor) -> None:
    first = buffer.narrow(0, 0, 1) if 0 in buffer.stride() else buffer
    first.copy_(torch.zeros(first.shape).to(first.dtype))


def test_buffers_that_share_memory_are_restored_together() -> None:
    whole = torch.arange(6.0)
    part = WithBuffers(whole=whole, odd=whole[1::2], turned=whole.view(2, 3).t())
    registry = registry_of(part=part)
    payload = saved(registry)
    whole.zero_()
    registry.read(payload)
    assert whole.tolist() == [0, 1, 2, 3, 4, 5]
    assert part.odd.data_ptr() == whole.data_ptr() + 4


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (torch.eye(2).to_sparse(), "^part.buffer is sparse .sparse_coo"),
        (torch.arange(5.0).unfold(0, 3, 1), "^part.buffer has elements that share memory"),
        (torch.empty(2, device="meta"), "^part.buffer is on the meta device"),
    ],
)
def test_a_buffer_that_cannot_be_saved_is_refused_by_name(buffer: Tensor, message: str) -> None:
    with pytest.raises(FunctionError, match=message):
        registry_of(part=WithBuffers(buffer=buffer))


def test_a_model_in_channels_last_has_the_bits_and_the_payload_of_a_contiguous_one() -> None:
    states = []
    for form in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(3)
        model = nn.Conv2d(4, 4, 3).to(memory_format=form)  # type: ignore[call-overload]
        optimizer = torch.optim.Adam(model.parameters(), 0.1)
        registry = registry_of(model=model, optimizer=optimizer)
        registry.try_state()
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        registry.step()
        payload = saved(registry)
        with torch.no_grad():
            model.weight.zero_()
            optimizer.state[model.weight]["exp_avg"].zero_()
        registry.read(payload)
        assert bytes(saved(registry)) == bytes(payload)
        assert model.weight.is_contiguous(memory_format=form)
        assert optimizer.state[model.weight]["exp_avg"].stride() == model.weight.stride()
        states.append(bytes(payload))
    assert states[0] == states[1]


class WithExtra(nn.Linear):
    scale = 1.0

    def get_extra_state(self) -> dict[str, float]:
        return {"scale": self.scale}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.scale = state["scale"]


def test_the_extra_state_of_a_modules_parts_is_restored() -> None:
    part = WithExtra(2, 2)
    model = nn.Sequential(nn.Linear(2, 2), part)
    registry = registry_of(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    registry.try_state()
    part.scale = 4.0
    payload = saved(registry)
    part.scale = 1.0
    registry.read(payload)
    assert part.scale == 4.0


def test_an_optimizer_that_needs_a_closure_is_refused_with_the_reason() -> None:
    net = nn.Linear(2, 2)
    with pytest.raises(FunctionError, match=r"^lbfgs \(LBFGS\) computes the loss several times"):
        registry_of(net=net, lbfgs=torch.optim.LBFGS(net.parameters()))


def test_an_optimizer_of_sparse_gradients_is_refused_with_the_reason() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    with pytest.raises(FunctionError, match=r"takes only sparse gradients.*use sparse=False"):
        registry_of(table=table, optimizer=torch.optim.SparseAdam(table.parameters()))


def test_an_error_of_a_dry_step_passes_unchanged() -> None:
    class Fails(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise ZeroDivisionError("its own")

    net = nn.Linear(2, 2)
    optimizer = Fails(net.parameters(), 0.1)
    with pytest.raises(ZeroDivisionError, match="its own"):
        registry_of(net=net, optimizer=optimizer)


@pytest.mark.seconds
def test_ranks_share_and_restore_tensors_of_any_form(tmp_path: Path) -> None:
    worlds = Worlds(tmp_path)
    spec = TrainingSpec.model_validate(
        {
            "function": "tests.support.ranks.functions:odd_tensors",
            "train": {"steps": 4, "global_batch": 8, "micro_batch": 4, "seed": 5},
            "parallel": {"dp_shard": 2},
        }
    )
    expected = [rank["digests"] for rank in worlds.run(programs.trained, spec, tmp_path)]
    again = [rank["digests"] for rank in worlds.run(programs.trained, spec, tmp_path, 2)]
    assert again == [{step: digests[step] for step in (2, 3, 4)} for digests in expected]
