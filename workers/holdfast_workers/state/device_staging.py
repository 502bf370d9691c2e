"""Copies tensors from an accelerator to the host while training goes on.

Uses pinned buffers, allocated once, and a CUDA stream of its own. `start_copy` only enqueues: the
copy starts after the work that training has enqueued so far, and training's stream does not wait
for it; the thread that needs the bytes waits. Until then the tensors must not change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class DeviceStaging:
    """Stages the given CUDA tensors of one device; one copy at a time.

    The tensors may change their content between copies, but not their storage.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._sources = [tensor.detach().view(-1).view(torch.uint8) for tensor in tensors]
        self._targets = [
            torch.empty(source.numel(), dtype=torch.uint8, pin_memory=True)
            for source in self._sources
        ]
        self._device = self._sources[0].device
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        # `blocking`: a waiting thread sleeps and leaves its processor to training.
        self._copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    @property
    def arrays(self) -> list[NDArray[np.uint8]]:
        """The staged bytes; valid once the function returned by `start_copy` has returned."""
        return [target.numpy() for target in self._targets]

    def start_copy(self) -> Callable[[], None]:
        """Start a copy; return a function that waits, in any thread, until it is complete."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for source, target in zip(self._sources, self._targets, strict=True):
                target.copy_(source, non_blocking=True)
            self._copied.record(self._stream)
        return self._copied.synchronize
