"""Buffers of a module that are no part of its state, so that a recovery builds them anew."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def unsaved_buffers(module: nn.Module) -> Iterator[str]:
    """The names of the buffers that were registered with `persistent=False`."""
    persistent = module.state_dict(keep_vars=True)
    for name, _ in module.named_buffers():
        if name not in persistent:
            yield name
