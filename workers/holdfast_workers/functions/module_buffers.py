"""The buffers of a module: which are no part of its state, and where it keeps each of them.

A module that assigns to a buffer's attribute (`self.mean = 0.9 * self.mean + ...`) replaces the
tensor, so the tensor of the registration says nothing about the present state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from holdfast_workers.functions.function_errors import FunctionError


@dataclass(frozen=True)
class BufferPlace:
    """An attribute of a module that holds a buffer."""

    module: nn.Module
    attribute: str

    def current(self, name: str, former: Tensor) -> Tensor:
        """The present tensor. Raises FunctionError, with `name`, if it has another shape or dtype
        than `former`."""
        tensor: object = getattr(self.module, self.attribute, None)
        if tensor is former:
            return former
        if isinstance(tensor, Tensor) and (tensor.shape, tensor.dtype) == (
            former.shape,
            former.dtype,
        ):
            return tensor
        now = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
        raise FunctionError(
            f"{name} was a {former.dtype} buffer of shape {tuple(former.shape)} at the first step "
            f"and is {now} now: keep its shape and dtype, or keep what grows in an object with "
            "state_dict and load_state_dict"
        )


def buffer_places(module: nn.Module) -> Iterator[tuple[str, BufferPlace]]:
    """Each buffer's name in `module`, and its place."""
    for path, part in module.named_modules():
        for attribute, _ in part.named_buffers(recurse=False):
            yield f"{path}.{attribute}" if path else attribute, BufferPlace(part, attribute)


def unsaved_buffers(module: nn.Module) -> Iterator[str]:
    """The names of the buffers that were registered with `persistent=False`."""
    persistent = module.state_dict(keep_vars=True)
    for name, _ in module.named_buffers():
        if name not in persistent:
            yield name
