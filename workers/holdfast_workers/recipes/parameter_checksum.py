"""A checksum that detects changes of tensors between two steps.

The checksum is the sum of each tensor's words as integers, so any single changed bit changes it. It
costs one read of the tensors at the bandwidth of their memory, on any device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class ParameterChecksum:
    """Has nothing recorded at first; without tensors it never reports a change."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._parts = [part for tensor in tensors for part in _words(tensor)]
        self._recorded: Tensor | None = None

    def record(self) -> None:
        """Record the current sums; the tensors must not change until the next call."""
        self._recorded = self._sums() if self._parts else None

    def has_changed(self) -> bool:
        """Whether a tensor differs from its state at the last `record`."""
        return self._recorded is not None and not torch.equal(self._sums(), self._recorded)

    def _sums(self) -> Tensor:
        return torch.stack([part.sum(dtype=torch.int64) for part in self._parts])


def _words(tensor: Tensor) -> list[Tensor]:
    """The tensor's memory as 64-bit words as far as possible, and the rest in smaller words."""
    flat = tensor.detach().view(-1).view(torch.uint8)
    if flat.storage_offset() % 8:
        return [flat.view(torch.int32)] if flat.numel() else []
    whole = flat.numel() // 8 * 8
    return [part for part in (flat[:whole].view(torch.int64), flat[whole:]) if part.numel()]
