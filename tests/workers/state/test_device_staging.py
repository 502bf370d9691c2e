from __future__ import annotations

import time

import pytest
import torch

from holdfast_workers.state.digest import payload_digest
from holdfast_workers.state.rank_state import RankState, ShardBox, StateTensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NUMBERS = 64 << 20


def state_of(tensor: torch.Tensor) -> RankState:
    shape = tuple(tensor.shape)
    return RankState(
        [StateTensor("w", tensor, ShardBox(shape, (0,) * len(shape), shape, True))], []
    )


def test_a_snapshot_is_copied_while_training_reads_the_tensors() -> None:
    tensor = torch.randn(NUMBERS, device="cuda")
    state = state_of(tensor)
    expected = state.digest({"step": 1})
    for _ in range(3):  # the buffers are reused
        frozen = state.freeze({"step": 1})
        (tensor * 2).sum()  # the next forward
        payload = memoryview(bytearray(state.layout.payload_bytes))
        assert frozen.write(payload) == expected == payload_digest(payload)


def test_a_snapshot_includes_all_previously_enqueued_work() -> None:
    tensor = torch.zeros(NUMBERS, device="cuda")
    state = state_of(tensor)
    state.freeze({"step": 0}).write(memoryview(bytearray(state.layout.payload_bytes)))
    for _ in range(200):
        tensor.add_(1.0)
    frozen = state.freeze({"step": 1})
    payload = bytearray(state.layout.payload_bytes)
    frozen.write(memoryview(payload))
    assert torch.frombuffer(payload, dtype=torch.float32, count=NUMBERS).eq(200.0).all()


def test_freezing_does_not_block() -> None:
    tensor = torch.randn(4 * NUMBERS, device="cuda")
    state = state_of(tensor)
    state.freeze({"step": 0})
    torch.cuda.synchronize()
    began = time.perf_counter()
    state.freeze({"step": 1})
    frozen_s = time.perf_counter() - began
    torch.cuda.synchronize()
    assert frozen_s < (time.perf_counter() - began) / 4
