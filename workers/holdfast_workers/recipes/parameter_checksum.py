"""A seal on tensors that nobody is to change for a while: it tells whether somebody did.

It is the sum of each tensor's words, as integers: one changed bit changes it, whichever it is.
It costs one reading of the tensors at the bandwidth of their memory, wherever they lie.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Seal:
    """Open until it is closed; one on nothing is never broken."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._parts = [part for tensor in tensors for part in _words(tensor)]
        self._closed: Tensor | None = None

    def close(self) -> None:
        """From here on the tensors are to stay as they are, until it is closed anew."""
        self._closed = self._sums() if self._parts else None

    def is_broken(self) -> bool:
        """Whether they are not what they were when it was closed."""
        return self._closed is not None and not torch.equal(self._sums(), self._closed)

    def _sums(self) -> Tensor:
        return torch.stack([part.sum(dtype=torch.int64) for part in self._parts])


def _words(tensor: Tensor) -> list[Tensor]:
    """The tensor's memory as 64-bit words where it can be read so, and what is left of it."""
    flat = tensor.detach().view(-1).view(torch.uint8)
    if flat.storage_offset() % 8:
        return [flat.view(torch.int32)] if flat.numel() else []
    whole = flat.numel() // 8 * 8
    return [part for part in (flat[:whole].view(torch.int64), flat[whole:]) if part.numel()]
