"""A large state that goes to the host and is digested while training computes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from benchmarks.gpu_parts.figures import Setting, StagingFigures
from holdfast_workers.state.digest import payload_digest
from holdfast_workers.state.rank_state import RankState, ShardBox, Snapshot, StateTensor

STATE_BYTES, SMALL_STATE_BYTES = 16 << 30, 64 << 20
PIECES = 16
SAVES = 4
"""The first, which allocates, does not count."""
STEPS_BETWEEN = 2
"""Steps after a save, before the next one begins."""


def staging(setting: Setting) -> StagingFigures:
    """Raises ValueError if the digest of a copy is not that of its bytes, or the state's."""
    nbytes = SMALL_STATE_BYTES if setting.small else STATE_BYTES
    state = _state(setting, nbytes)
    payload = memoryview(bytearray(state.layout.payload_bytes))
    step = _step(setting)
    _timed(step)
    alone_s = median(_timed(step) for _ in range(8))
    saves = [_Save(state, number, payload, step, alone_s) for number in range(SAVES)][1:]
    digest = state.digest({"step": SAVES - 1})
    if not saves[-1].digest == digest == payload_digest(payload):
        raise ValueError(f"the state's digest is {digest}, and its copy's {saves[-1].digest}")
    staged_s = median(save.staged_s for save in saves)
    digested_s = median(save.digested_s for save in saves)
    return StagingFigures(
        state_bytes=state.layout.payload_bytes,
        step_s=round(alone_s, 5),
        stall_s=round(median(save.stall_s for save in saves), 5),
        staged_s=round(staged_s, 4),
        digested_s=round(digested_s, 4),
        added_s=round(median(save.added_s for save in saves), 4),
        staged_gb_per_s=round(nbytes / staged_s / 1e9, 2) if setting.on_device else 0.0,
        digested_gb_per_s=round(nbytes / digested_s / 1e9, 2),
    )


class _Save:
    """One save, made while steps go on in this thread."""

    def __init__(
        self,
        state: RankState,
        number: int,
        payload: memoryview,
        step: Callable[[], None],
        step_alone_s: float,
    ) -> None:
        self._payload = payload
        self.digest = ""
        self.staged_s = self.digested_s = 0.0
        self._began = time.perf_counter()
        snapshot = state.freeze({"step": number})
        self.stall_s = time.perf_counter() - self._began
        copier = threading.Thread(target=self._write, args=(snapshot,))
        copier.start()
        beside = []
        while copier.is_alive():
            beside.append(_timed(step))
        copier.join()
        self.added_s = max(0.0, self.stall_s + sum(beside) - len(beside) * step_alone_s)
        for _ in range(STEPS_BETWEEN):
            _timed(step)

    def _write(self, snapshot: Snapshot) -> None:
        snapshot.await_sources()
        self.staged_s = time.perf_counter() - self._began
        self.digest = snapshot.write(self._payload)
        self.digested_s = time.perf_counter() - self._began


def _state(setting: Setting, nbytes: int) -> RankState:
    numbers = nbytes // PIECES // 4
    pieces = [_piece(f"piece.{index}", numbers, setting.device) for index in range(PIECES)]
    return RankState(pieces)


def _piece(name: str, numbers: int, device: str) -> StateTensor:
    tensor = torch.randn(numbers, device=device)
    return StateTensor(name, tensor, ShardBox((numbers,), (0,), (numbers,), True))


def _step(setting: Setting) -> Callable[[], None]:
    """A step of matrix products, some 50 ms on a large device."""
    size, rounds = (512, 4) if setting.small else (8192, 30)
    dtype = torch.bfloat16 if setting.on_device else torch.float32
    left, right = (torch.randn(size, size, device=setting.device).to(dtype) for _ in range(2))
    target = torch.empty_like(left)

    def step() -> None:
        for _ in range(rounds):
            torch.matmul(left, right, out=target)
        _await(target)

    return step


def _await(target: Tensor) -> None:
    if target.is_cuda:
        torch.cuda.current_stream(target.device).synchronize()


def _timed(step: Callable[[], None]) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began
