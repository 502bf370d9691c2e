"""A tensor's bytes do not depend on its memory format, and it keeps that format."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.workers.state.test_rank_state import SMALL, piece
from torch import Tensor

from holdfast_workers.state.rank_state import RankState
from holdfast_workers.state.strided_bytes import host_bytes, obstacle

FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "channels_last": lambda t: t.to(memory_format=torch.channels_last),
    "transposed": lambda t: t.transpose(1, 3).contiguous().transpose(1, 3),
    "view": lambda t: torch.stack([t, t], dim=2)[:, :, 0],
    "reversed": lambda t: t.flip(0),
    "double": lambda t: t.double().to(memory_format=torch.channels_last),
    "conjugate": lambda t: torch.complex(t, -t).conj(),
    "negative": lambda t: torch.complex(t, -t).conj().imag,
}


def values() -> Tensor:
    return torch.randn((4, 3, 5, 2), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("form", FORMS)
def test_a_tensor_of_any_format_has_the_bytes_of_a_contiguous_one_and_keeps_its_format(
    form: str,
) -> None:
    tensor = FORMS[form](values())
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    state, same = RankState([piece("w", tensor)]), RankState([piece("w", plain)])
    assert state.layout == same.layout
    payload = bytearray(state.layout.payload_bytes)
    assert state.freeze(SMALL).write(memoryview(payload)) == same.digest(SMALL)
    expected, strides, address = plain.clone(), tensor.stride(), tensor.data_ptr()
    tensor.zero_()
    state.read(memoryview(payload))
    assert torch.equal(tensor, expected)
    assert (tensor.stride(), tensor.data_ptr()) == (strides, address)


@pytest.mark.parametrize("shape", [(4, 3), (1, 3), (), (0, 4)])
def test_an_expanded_tensor_is_written_and_read(shape: tuple[int, ...]) -> None:
    base = torch.tensor(2.5)
    tensor = base.expand(shape)
    state = RankState([piece("w", tensor)])
    payload = bytearray(state.layout.payload_bytes)
    state.freeze(SMALL).write(memoryview(payload))
    base.zero_()
    state.read(memoryview(payload))
    assert tensor.tolist() == torch.full(shape, 2.5).tolist()


def test_the_bytes_of_a_contiguous_tensor_are_not_copied() -> None:
    tensor = values()
    assert host_bytes(tensor).ctypes.data == tensor.data_ptr()
    (source, _) = RankState([piece("w", tensor)]).freeze(SMALL).sources
    assert source.ctypes.data == tensor.data_ptr()


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (torch.eye(3).to_sparse(), "is sparse"),
        (torch.eye(3).to_sparse_csr(), "is sparse"),
        (torch.empty(3, device="meta"), "meta device"),
        (torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "is quantized"),
        (torch.arange(5.0).unfold(0, 3, 1), "share memory"),
        (torch.nn.LazyLinear(2).weight, "has no shape yet"),
    ],
)
def test_a_tensor_without_bytes_of_its_own_is_refused_with_the_reason(
    tensor: Tensor, why: str
) -> None:
    assert why in obstacle(tensor)


@pytest.mark.parametrize("form", FORMS)
def test_a_tensor_of_any_format_has_no_obstacle(form: str) -> None:
    assert obstacle(FORMS[form](values())) == ""
    assert obstacle(torch.ones(3).expand(4, 3)) == ""
