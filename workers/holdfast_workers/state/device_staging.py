"""Bringing tensors from an accelerator to the host beside training.

Pinned buffers, made once, and a stream of their own. `begin` only enqueues: the copy starts when
what training has enqueued so far is done, and training's stream does not wait for it; the thread
that wants the bytes does. Until then nobody may change the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Staging:
    """For the CUDA tensors given, on one device, by their places in memory: they may change their
    content, not their storage. One copy at a time."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._sources = [tensor.detach().view(-1).view(torch.uint8) for tensor in tensors]
        self._targets = [
            torch.empty(source.numel(), dtype=torch.uint8, pin_memory=True)
            for source in self._sources
        ]
        self._device = self._sources[0].device
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        # `blocking`: who waits for it sleeps, and leaves its processor to training.
        self._copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    @property
    def arrays(self) -> list[NDArray[np.uint8]]:
        """Where the bytes are, once what `begin` gave has returned."""
        return [target.numpy() for target in self._targets]

    def begin(self) -> Callable[[], None]:
        """Start to copy; what is returned waits, in any thread, until the bytes are there."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for source, target in zip(self._sources, self._targets, strict=True):
                target.copy_(source, non_blocking=True)
            self._copied.record(self._stream)
        return self._copied.synchronize
