"""The parameters and persistent buffers of registered modules: by name, as they are now.

A module that assigns to a buffer's attribute (`self.mean = 0.9 * self.mean + ...`) replaces the
tensor, so the tensor of the registration says nothing about the present state. Parts that are
created, removed or replaced otherwise have no place in the state's layout, and are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from holdfast_workers.functions.function_errors import FunctionError
from holdfast_workers.functions.replicated_modules import bare_name, bare_names
from holdfast_workers.parallelize.shard import sharded_modules


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


class ModuleParts:
    """The parts of `modules`, by the names under which they are registered."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._first = dict(self._checkable())

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Each parameter and persistent buffer; one that modules share comes under each name."""
        for prefix, module in self._modules.items():
            for name, tensor in _tensors(module):
                yield f"{prefix}.{name}", tensor

    def buffer_places(self) -> Iterator[tuple[str, BufferPlace]]:
        """Each buffer's name and place."""
        for prefix, module in self._modules.items():
            replaced = [*bare_names(module)]
            for path, part in module.named_modules():
                for attribute, _ in part.named_buffers(recurse=False):
                    name = bare_name(f"{path}.{attribute}" if path else attribute, replaced)
                    yield f"{prefix}.{name}", BufferPlace(part, attribute)

    def unsaved_buffers(self) -> list[str]:
        """The names of the buffers that were registered with `persistent=False`."""
        return [
            f"{prefix}.{name}"
            for prefix, module in self._modules.items()
            for name in _unsaved_buffers(module)
        ]

    def check_unchanged(self) -> None:
        """Raise FunctionError if the modules have other parts than at the registration."""
        now = dict(self._checkable())
        for name in self._first.keys() ^ now.keys():
            did = "was created after" if name in now else "has been removed since"
            raise FunctionError(
                f"{name} {did} the first step: create all parameters and buffers before, e.g. by "
                "one forward pass, so that they are saved"
            )
        for name, tensor in now.items():
            if isinstance(tensor, nn.Parameter) and tensor is not self._first[name]:
                raise FunctionError(
                    f"{name} was replaced by another parameter after the first step, which is not "
                    "saved: copy values into it, e.g. by load_state_dict without assign=True"
                )

    def _checkable(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors of modules without FSDP, which exchanges the parameters of a module while it
        computes."""
        divided = {name for name, module in self._modules.items() if sharded_modules(module)}
        for name, tensor in self.tensors():
            if name.partition(".")[0] not in divided:
                yield name, tensor


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The module's parameters and persistent buffers, each once, by their bare names."""
    replaced = [*bare_names(module)]
    for name, parameter in module.named_parameters():
        yield bare_name(name, replaced), parameter
    persistent = module.state_dict(keep_vars=True)
    for name, tensor in module.named_buffers():
        if name in persistent:
            yield bare_name(name, replaced), tensor


def _unsaved_buffers(module: nn.Module) -> Iterator[str]:
    persistent = module.state_dict(keep_vars=True)
    for name, _ in module.named_buffers():
        if name not in persistent:
            yield name


class ExtraState:
    """The state of one module that is neither a parameter nor a buffer: what `get_extra_state` of
    its parts returns, by their bare names."""

    def __init__(self, parts: dict[str, nn.Module]) -> None:
        self._parts = parts

    @classmethod
    def of(cls, module: nn.Module) -> ExtraState | None:
        """The extra state of `module`, or None if no part of it has any."""
        replaced = [*bare_names(module)]
        parts = {
            bare_name(f"{path}." if path else "", replaced): part
            for path, part in module.named_modules()
            if type(part).get_extra_state is not nn.Module.get_extra_state
        }
        return cls(parts) if parts else None

    def state_dict(self) -> dict[str, Any]:
        return {name: part.get_extra_state() for name, part in self._parts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, part in self._parts.items():
            part.set_extra_state(state[name])
